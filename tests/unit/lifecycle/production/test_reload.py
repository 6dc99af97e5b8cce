"""Settings read again while a hive runs: what restarts, what is logged, what goes back."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from lifecycle import (
    Cell,
    HiveError,
    Hook,
    Lifecycle,
    Secret,
    Settings,
    SettingsError,
    Sources,
    config,
    invoke,
    module,
    provide,
)
from lifecycle.production import ChangedSetting, Reload
from lifecycle.testing import HiveStarter

ROOT = Path(__file__).parents[4]
events: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    events.clear()


class TeaSettings(Settings, frozen=True):
    tea: str = "green"
    """What is poured."""
    key: Secret = Secret("")
    """Of the cupboard."""

    def validate(self) -> None:
        if self.tea == "none":
            raise ValueError("tea=none: expected a tea")


class CakeSettings(Settings, frozen=True):
    cake: str = "plum"


class Pot:
    def __init__(self, settings: TeaSettings, lifecycle: Lifecycle) -> None:
        self.tea = settings.tea
        lifecycle.append(Hook("pot", self.start, self.stop))

    async def start(self) -> None:
        if self.tea == "poison":
            raise OSError("poison")
        events.append(f"pot of {self.tea}")

    async def stop(self) -> None:
        events.append(f"no pot of {self.tea}")


class Cup:
    def __init__(self, pot: Pot, lifecycle: Lifecycle) -> None:
        self.pot = pot
        lifecycle.append(Hook("cup", self.start))

    async def start(self) -> None:
        events.append(f"cup of {self.pot.tea}")


class Plate:
    def __init__(self, settings: CakeSettings, lifecycle: Lifecycle) -> None:
        self.cake = settings.cake
        lifecycle.append(Hook("plate", self.start))

    async def start(self) -> None:
        events.append(f"plate of {self.cake}")


def cells() -> list[Cell]:
    return [
        module("pot", "A pot", config(TeaSettings), provide(Pot), invoke(Pot)),
        module("cup", "A cup", provide(Cup), invoke(Cup)),
        module("plate", "A plate", config(CakeSettings), provide(Plate), invoke(Plate)),
    ]


def write(folder: Path, values: Mapping[str, str]) -> None:
    for name, text in values.items():
        (folder / name).write_text(text, encoding="utf-8")


async def test_a_module_with_changed_settings_restarts_with_its_dependents(
    hive: HiveStarter, tmp_path: Path
) -> None:
    running = await hive(*cells(), settings=Sources(config_dir=tmp_path))
    plate = running.get(Plate)
    del events[:]
    found = await running.reload()
    assert (found.changed, found.restarted, events) == ((), (), [])
    write(tmp_path, {"tea": "black", "key": "secret"})
    found = await running.get(Reload)()
    assert found.changed[0] == ChangedSetting("tea", "green", "black", f"file {tmp_path}/tea")
    assert [one.name for one in found.changed] == ["tea", "key"]
    assert "secret" not in str(found)
    assert found.restarted == ("pot",)
    assert events == ["no pot of green", "pot of black", "cup of black"]
    assert running.get(Plate) is plate
    assert running.get(TeaSettings).tea == "black"
    assert [one.text for one in running.settings()][:1] == ["black"]


async def test_settings_with_faults_change_nothing(hive: HiveStarter, tmp_path: Path) -> None:
    running = await hive(*cells(), settings=Sources(config_dir=tmp_path))
    del events[:]
    write(tmp_path, {"tea": "none", "cake": "lemon"})
    with pytest.raises(SettingsError, match="expected a tea"):
        await running.reload()
    assert events == []
    assert running.get(CakeSettings).cake == "plum"


async def test_a_module_that_does_not_start_gets_its_settings_back(hive: HiveStarter, tmp_path: Path) -> None:
    running = await hive(*cells(), settings=Sources(config_dir=tmp_path))
    write(tmp_path, {"tea": "poison", "cake": "lemon"})
    with pytest.raises(HiveError, match=r"pot: .*poison.*; those before are in force"):
        await running.reload()
    assert running.modules.disabled == []
    assert (running.get(Pot).tea, running.get(Cup).pot.tea, running.get(Plate).cake) == (
        "green",
        "green",
        "plum",
    )
    write(tmp_path, {"tea": "black"})
    assert (await running.reload()).restarted == ("pot", "plate")


async def test_a_module_that_is_disabled_stays_so(hive: HiveStarter, tmp_path: Path) -> None:
    running = await hive(*cells(), settings=Sources(config_dir=tmp_path))
    await running.modules.disable("plate")
    write(tmp_path, {"cake": "lemon"})
    await running.reload()
    assert running.modules.disabled == ["plate"]
    await running.modules.enable("plate")
    assert running.get(Plate).cake == "lemon"


async def test_what_is_needed_outside_of_modules_waits_for_a_restart(
    hive: HiveStarter, tmp_path: Path
) -> None:
    running = await hive(config(CakeSettings), invoke(bake), settings=Sources(config_dir=tmp_path))
    write(tmp_path, {"cake": "lemon"})
    found = await running.reload()
    assert (found.restarted, found.at_restart) == ((), ("cake",))


def bake(settings: CakeSettings) -> None:
    events.append(f"bakes {settings.cake}")


PROGRAM = """
    import importlib

    from lifecycle import Hive, Sources, main
    from lifecycle.production import reload

    here = importlib.import_module("tests.unit.lifecycle.production.test_reload")
    main(Hive(*here.cells(), reload(), name="table", settings=Sources(config_dir={folder!r})))
"""


def test_sighup_reloads_and_sigterm_ends(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.mkdir()
    (tmp_path / "table.py").write_text(
        textwrap.dedent(PROGRAM).format(folder=str(settings)), encoding="utf-8"
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "table.py"], cwd=tmp_path, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)

    try:
        wait_for("msg=started")
        write(settings, {"tea": "none"})
        process.send_signal(signal.SIGHUP)
        wait_for("expected a tea")
        write(settings, {"tea": "black"})
        process.send_signal(signal.SIGHUP)
        wait_for("restarted=pot")
        assert "before=green after=black" in (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
