"""Builds a graph of many cells, the same in every run."""

import random

from lifecycle.graph import ConstructorInfo, Edge, Graph, HookInfo, InvokeInfo, ModuleInfo, SettingInfo

FAMILIES = 20


def big_graph(cells: int) -> Graph:
    """Return cells in families, each with a service that needs some of the earlier ones."""
    dice = random.Random(cells)  # noqa: S311  # a shape, not a secret
    modules = [ModuleInfo("big", "Many cells", None)]
    modules += [ModuleInfo(f"big.family-{one}", f"Family {one}", "big") for one in range(FAMILIES)]
    names = [f"big.family-{one % FAMILIES}.cell-{one}" for one in range(cells)]
    constructors, edges, hooks = [], [], []
    for one, module in enumerate(names):
        modules.append(ModuleInfo(module, f"Does thing {one}", module.rpartition(".")[0]))
        services = [f"Service{one}", *(f"Part{one}x{part}" for part in range(dice.randrange(3)))]
        constructors += [
            ConstructorInfo(
                f"{module}/{name}", name, "provide", module, name, False, True, False, f"/big/{one}.py", 1
            )
            for name in services
        ]
        near = [dice.randrange(max(0, one - 120), one) for _ in range(dice.randrange(4))] if one else []
        far = [dice.randrange(one)] if one else []
        edges += [
            Edge(f"{module}/Service{one}", f"{names[need]}/Service{need}", f"service{need}")
            for need in sorted({*near, *far})
        ]
        hooks.append(
            HookInfo(f"{module}/Service{one}:0", f"start {one}", module, f"{module}/Service{one}", ())
        )
    return Graph(
        name="big",
        modules=tuple(modules),
        constructors=tuple(constructors),
        edges=tuple(edges),
        invokes=(InvokeInfo(f"{names[-1]}/run", "run", names[-1], "/big/run.py", 1),),
        settings=tuple(
            SettingInfo(f"option-{one}", module, f"Settings{one}", "int", str(one), "default", "How many.")
            for one, module in enumerate(names)
        ),
        hooks=tuple(hooks),
    )
