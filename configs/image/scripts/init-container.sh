#!/usr/bin/python3 -I
# Init container clean-cilium-state: does nothing unless it is told to.
import os
import sys

ASKED = {
    "--bpf-state": ("CILIUM_BPF_STATE", "CLEAN_CILIUM_BPF_STATE"),
    "--all-state": ("CILIUM_ALL_STATE", "CLEAN_CILIUM_STATE"),
}
for option, names in ASKED.items():
    if "true" in map(os.environ.get, names):
        code = os.spawnlp(os.P_WAIT, "hive", "hive", "cleanup", "--force", option)
        if code:
            sys.exit(code)
