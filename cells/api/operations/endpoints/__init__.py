"""The part of the API that speaks for the endpoint cell.

Needs:  Endpoints, EndpointChanges, Controllers.
Gives:  EndpointOperations.
"""
