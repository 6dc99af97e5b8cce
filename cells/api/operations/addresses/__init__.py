"""The part of the API that speaks for the ipam cell.

Needs:  Ipam.
Gives:  AddressOperations.
"""
