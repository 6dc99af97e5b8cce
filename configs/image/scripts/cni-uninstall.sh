#!/usr/bin/python3 -I
# Before the agent's container stops: our CNI configuration off the node, if cni-uninstall says so.
# Takes HOST_PREFIX and CILIUM_CUSTOM_CNI_CONF.
import os

os.execvp("hive", ["hive", "cni", "uninstall"])
