"""Policy map entries as values: copied on write, and compared."""

from hypothesis import given
from hypothesis import strategies as st

from cells.maps.policy_map import EntryChanges, PolicyEntryMap
from cells.maps.records.endpoints import PolicyEntry, PolicyKey

KEYS = st.builds(PolicyKey, identity=st.integers(0, 600), egress=st.booleans())
ENTRIES = st.sampled_from([PolicyEntry(), PolicyEntry(deny=True), PolicyEntry(proxy_port=7)])
CHANGES = st.dictionaries(KEYS, st.none() | ENTRIES, max_size=9)


@given(st.dictionaries(KEYS, ENTRIES, max_size=9), st.lists(CHANGES, max_size=6), st.data())
def test_entries_are_those_of_a_dictionary_and_differences_lead_from_one_to_another(
    first: dict[PolicyKey, PolicyEntry],
    steps: list[dict[PolicyKey, PolicyEntry | None]],
    data: st.DataObject,
) -> None:
    versions, models = [PolicyEntryMap(first)], [first]
    for step in steps:
        added = {key: entry for key, entry in step.items() if entry is not None}
        versions.append(versions[-1].changed(EntryChanges(added, step.keys() - added.keys())))
        after = models[-1] | step
        models.append({key: entry for key, entry in after.items() if entry is not None})
    for version, model in zip(versions, models, strict=True):
        assert dict(version) == dict(version.items()) == model
        assert len(version) == len(model)
        assert version == PolicyEntryMap(model)
    one, other = (data.draw(st.integers(0, len(steps))) for _ in range(2))
    changes = versions[one].difference(versions[other])
    reached = {
        key: entry for key, entry in (models[other] | dict(changes.new)).items() if key not in changes.removed
    }
    assert reached == models[one]


def test_one_change_gives_each_map_what_it_lacks_whatever_another_had_before() -> None:
    peers = [PolicyKey(identity=number, egress=False) for number in (1, 2, 3)]
    changes = EntryChanges({peers[0]: PolicyEntry(), peers[1]: PolicyEntry()}, [peers[2]])
    allowed = PolicyEntryMap({peers[0]: PolicyEntry(), peers[2]: PolicyEntry()})
    denied = PolicyEntryMap({peers[0]: PolicyEntry(deny=True)})
    packed = [(key.pack(), PolicyEntry().pack(key)) for key in peers]
    for present in (allowed, denied, dict(allowed), allowed, {}):
        puts, drops = changes.step(present)
        lacking = packed[:2] if present in (denied, {}) else packed[1:2]
        assert puts == lacking
        assert list(drops) == ([peers[2].pack()] if peers[2] in present else [])
