"""One module several times in a hive: each with settings, tables, health and jobs of its own."""

from typing import Annotated

import pytest

from lifecycle import (
    Cell,
    GraphError,
    Health,
    HealthTree,
    Hive,
    HiveError,
    JobMetrics,
    Jobs,
    ModuleId,
    Named,
    Settings,
    SettingsError,
    Sources,
    Table,
    config,
    config_private,
    group,
    invoke,
    module,
    provide,
    provide_private,
)
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


class ResolverSettings(Settings, frozen=True):
    """Settings of one resolver."""

    server: str = "10.0.0.1"
    """The one to ask."""

    tries: int = 3
    """How often."""

    def validate(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries={self.tries}: expected at least 1")
        if self.server == "nowhere" and self.tries > 1:
            raise ValueError("tries needs a server")


class Answer(Settings, frozen=True):  # any immutable row would do
    name: str


class Resolver:
    def __init__(
        self, settings: ResolverSettings, answers: Table[str, Answer], health: Health, jobs: Jobs
    ) -> None:
        self.settings, self.answers, self.health = settings, answers, health
        jobs.one_shot("resolve", self.resolve)

    async def resolve(self) -> None:
        with self.answers.txn() as txn:
            txn.put(Answer(name=f"{self.settings.server} after {self.settings.tries}"))
        self.health.ok("resolved")


def answers(module: ModuleId) -> Table[str, Answer]:
    return Table(f"{module}-answers", key=lambda answer: answer.name)


def public(resolver: Resolver) -> Resolver:
    return resolver


def resolver(name: str) -> Cell:
    return module(
        name,
        "Resolver",
        config_private(ResolverSettings, prefix=name),
        provide_private(answers, Resolver),
        provide(public, name=name),
        invoke(Resolver),
    )


class Client:
    def __init__(
        self,
        inside: Annotated[Resolver, Named("inside")],
        outside: Annotated[Resolver, Named("outside")],
    ) -> None:
        self.servers = inside.settings.server, outside.settings.server


ORIGINS = "outside-server from flag --outside-server; outside-tries from flag --outside-tries"

BOTH = group(resolver("inside"), resolver("outside"))


async def test_each_instance_has_settings_tables_health_and_jobs_of_its_own() -> None:
    sources = Sources(["--inside-server=a"], {"HIVE_OUTSIDE_TRIES": "7"})
    async with Hive(BOTH, settings=sources).started() as hive:
        await eventually(lambda: all(one.runs for one in hive.get(JobMetrics).snapshot()))
        assert [(one.name, one.all()[0].name) for one in hive.tables.all()] == [
            ("inside-answers", "a after 3"),
            ("outside-answers", "10.0.0.1 after 7"),
        ]
        messages = {one.module: one.message for one in hive.get(HealthTree).snapshot()}
        assert (messages["inside"], messages["outside"]) == ("resolved", "resolved")
        assert [(one.module, one.name) for one in hive.get(JobMetrics).snapshot()] == [
            ("inside", "resolve"),
            ("outside", "resolve"),
        ]
        await hive.modules.disable("inside")
        assert hive.get(Resolver, module="outside").settings.tries == 7


async def test_others_know_the_instances_by_name() -> None:
    async with Hive(
        BOTH, provide(Client), invoke(Client), settings={"outside-server": "b"}
    ).started() as hive:
        assert hive.get(Client).servers == ("10.0.0.1", "b")
        assert hive.get(Annotated[Resolver, Named("outside")]).settings.server == "b"
        assert hive.get(Resolver, module="inside") is hive.get(Annotated[Resolver, Named("inside")])
        with pytest.raises(HiveError, match=r"get\(\) cannot choose; say of which module, as in get\(Resol"):
            hive.get(Resolver)
        with pytest.raises(HiveError, match="there is no module 'outsider' in hive; did you mean outside"):
            hive.get(Resolver, module="outsider")


def test_the_options_of_each_instance_show_with_its_prefix() -> None:
    hive = Hive(BOTH)
    assert [option.name for option in hive.options()] == [
        "inside-server",
        "inside-tries",
        "outside-server",
        "outside-tries",
    ]
    assert {(one.name, one.module, one.help) for one in hive.graph().settings if "tries" in one.name} == {
        ("inside-tries", "inside", "How often."),
        ("outside-tries", "outside", "How often."),
    }


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--inside-tries=0"], "--inside-tries=0: expected at least 1"),
        (
            ["--outside-server=nowhere"],
            "outside: tries needs a server (from flag --outside-server)",
        ),
        (
            ["--outside-server=nowhere", "--outside-tries=2"],
            f"outside: tries needs a server ({ORIGINS})",
        ),
        (["--inside-trise=1"], "--inside-trise: no such setting; did you mean --inside-tries?"),
    ],
)
def test_a_fault_names_its_module_instance(flags: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Hive(BOTH, settings=Sources(flags)).check()
    assert [fault.text for fault in caught.value.faults] == [text]


def test_two_instances_without_prefixes_are_refused_with_what_to_do() -> None:
    def plain(name: str) -> Cell:
        return module(name, "Plain", config_private(ResolverSettings))

    with pytest.raises(GraphError) as caught:
        Hive(plain("one"), plain("two")).check()
    assert {(fault.kind, fault.text, fault.details[-1]) for fault in caught.value.faults} == {
        (
            "duplicate",
            f"setting {name} is declared twice",
            "do: give each a prefix of its own, as in config_private(S, prefix=...)",
        )
        for name in ("server", "tries")
    }


def test_two_instances_with_public_settings_are_refused_with_the_remedy() -> None:
    cells = [module(name, "X", config(ResolverSettings, prefix=name)) for name in ("a", "b")]
    with pytest.raises(
        GraphError, match=r"do: give each module settings of its own: config_private\(\.\.\., "
    ):
        Hive(*cells).check()


def test_use_of_a_private_struct_outside_its_module_is_refused() -> None:
    def asks(settings: ResolverSettings) -> None: ...

    with pytest.raises(GraphError, match="ResolverSettings is private to inside"):
        Hive(resolver("inside"), invoke(asks)).check()


def test_an_invalid_prefix_is_refused() -> None:
    with pytest.raises(GraphError, match="prefix 'Inside_': expected kebab-case such as inside"):
        Hive(config(ResolverSettings, prefix="Inside_")).check()
