#!/bin/sh
# Init container install-cni-binaries: the plugin onto the node. Takes HOST_PREFIX, CNI_DIR,
# OVERWRITE_CILIUM and OVERWRITE_LOOPBACK.
exec hive cni install
