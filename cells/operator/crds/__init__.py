"""The definitions of the custom resources: registered when a leader begins, upgraded by schema version.

Controller: what is to be there in, CustomResourceDefinitions of the API server out.
Needs:      ClusterAPI, OperatorOptions, CRDSettings.   Gives: CustomResources, definitions().
Why:        agents wait for them; nothing else of the leader starts before they are established.
"""

from cells.operator.crds.definitions import SCHEMA_VERSION, VERSION_LABEL, Definition, definitions
from cells.operator.crds.register import CRDSettings, CustomResources
from lifecycle import after, config, invoke, module, provide

__all__ = [
    "SCHEMA_VERSION",
    "VERSION_LABEL",
    "CRDSettings",
    "CustomResources",
    "Definition",
    "cell",
    "definitions",
]


@after(CustomResources)
def register() -> None:
    """Have them registered."""


cell = module(
    "custom-resources",
    "Definitions of the custom resources",
    config(CRDSettings),
    provide(CustomResources),
    invoke(register),
)
