#!/bin/sh
# Init container clean-cilium-state: does nothing unless it is told to.
set -e
if [ "${CILIUM_BPF_STATE}" = "true" ] || [ "${CLEAN_CILIUM_BPF_STATE}" = "true" ]; then
	hive cleanup --force --bpf-state
fi
if [ "${CILIUM_ALL_STATE}" = "true" ] || [ "${CLEAN_CILIUM_STATE}" = "true" ]; then
	hive cleanup --force --all-state
fi
