"""Error messages for objects that the kernel rejects."""

from collections.abc import Iterator

import pytest

from cells.datapath import libbpf
from cells.datapath.libbpf import LoadError, library, refusal_reason
from lifecycle import HiveError

REFUSED = """\
libbpf: prog 'hive_from_pod': BPF program load failed: Permission denied
libbpf: prog 'hive_from_pod': -- BEGIN PROG LOAD LOG --
0: R1=ctx() R10=fp0
226: (69) r2 = *(u16 *)(r1 +2)
R1 invalid mem access 'scalar'
processed 344 insns (limit 1000000) max_states_per_insn 0 total_states 22 peak_states 22 mark_read 0
-- END PROG LOAD LOG --
libbpf: prog 'hive_from_pod': failed to load: -13
"""


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


def test_the_verifiers_last_word_is_the_reason() -> None:
    assert refusal_reason(REFUSED) == "R1 invalid mem access 'scalar'"


def test_without_the_verifier_libbpfs_first_word_is() -> None:
    spoken = "libbpf: elf: x.o is not a valid eBPF object file\nlibbpf: more\n"
    assert refusal_reason(spoken) == "libbpf: elf: x.o is not a valid eBPF object file"
    assert not refusal_reason("")


def test_a_refusal_is_one_line_and_keeps_the_whole_log() -> None:
    error = LoadError("datapath.o: refused by the kernel", 13, REFUSED)
    assert (
        str(error) == "datapath.o: refused by the kernel: Permission denied: R1 invalid mem access 'scalar'"
    )
    assert error.log == REFUSED


def test_a_missing_library_names_its_package(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libbpf, "LIBRARY", "libbpf.so.999")
    with pytest.raises(HiveError, match=r"libbpf.so.999 cannot be opened .*apt-get install libbpf1"):
        library()
