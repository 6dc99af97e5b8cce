#!/usr/bin/python3 -I
# Init container install-cni-binaries: the plugin onto the node. Takes HOST_PREFIX, CNI_DIR,
# OVERWRITE_CILIUM and OVERWRITE_LOOPBACK.
import os

os.execvp("hive", ["hive", "cni", "install"])
