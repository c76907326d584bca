"""What every ObjectStore owes, as tests: subclass `StoreContract` and give it a `store` fixture.

A store that many processes or hosts share has more to prove; its own test file does that.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloud.digest import crc64nvme
from cloud.errors import (
    AlreadyExists,
    CannotCopy,
    CopyDiffers,
    NotFound,
    SourceUnreadable,
    TooLarge,
    Truncated,
    Unavailable,
)
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectStore, Receipt
from tests.support.patience import HANG_S

NEVER = Deadline.never()
PAST = Deadline(0.0, lambda: 1.0)
CHECK = b"123456789"
NO_KEYS = ["", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.hidden", "-a", "a/-b", "a b", "a\nb"]
NO_KEYS += ["a\0", "ä", "C:\\a", "a" * 901]
CHECK_CRC = 0xAE8B14860A799888  # the catalogue's check value of CRC-64/NVME


def put(store: ObjectStore, key: str, data: bytes = b"x") -> Receipt:
    return store.put(key, memoryview(data), deadline=NEVER)


def read(store: ObjectStore, key: str) -> bytes:
    return store.read(key, limit_bytes=1 << 30, deadline=NEVER)


def keys(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, after=after, deadline=NEVER)]


class StoreContract:
    keeps_sums = True
    """Whether the store tells a checksum of what it holds."""

    # ------------------------------------------------------------------------------------------------- put, get, read

    def test_what_was_put_is_read_back(self, store: ObjectStore) -> None:
        put(store, "run/a", b"some bytes")

        assert read(store, "run/a") == b"some bytes"

    def test_a_receipt_holds_the_sums_of_the_bytes(self, store: ObjectStore) -> None:
        assert put(store, "run/a", CHECK) == Receipt(9, CHECK_CRC, (CHECK_CRC,))

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        assert put(store, "run/empty", b"") == Receipt(0, 0, ())
        assert read(store, "run/empty") == b""
        assert store.stat("run/empty", deadline=NEVER).size == 0
        store.get("run/empty", memoryview(bytearray()), deadline=NEVER)

    def test_every_chunk_has_its_sum_and_the_whole_has_one(self, store: ObjectStore, tmp_path: Path) -> None:
        data = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"the rest"
        chunks = tuple(crc64nvme(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
        source = tmp_path / "source"
        source.write_bytes(data)
        sent: list[int] = []

        from_buffer = store.put("run/buffer", memoryview(data), deadline=NEVER, progress=lambda n, **_: sent.append(n))
        from_file = store.put("run/file", source, deadline=NEVER)

        assert from_buffer == from_file == Receipt(len(data), crc64nvme(data), chunks)
        assert sum(sent) == len(data)
        for key in ("run/buffer", "run/file"):
            into = bytearray(len(data))
            store.get(key, memoryview(into), deadline=NEVER)
            assert into == data

    def test_a_missing_source_is_named(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(SourceUnreadable, match=r"source .*nothing-here"):
            store.put("run/a", tmp_path / "nothing-here", deadline=NEVER)
        assert keys(store) == []

    def test_put_replaces_a_whole_object(self, store: ObjectStore) -> None:
        put(store, "run/a", b"a long first version")
        put(store, "run/a", b"second")

        assert read(store, "run/a") == b"second"

    def test_get_fills_the_buffer_from_the_offset(self, store: ObjectStore) -> None:
        put(store, "run/a", b"0123456789")
        into = bytearray(b"....")

        store.get("run/a", memoryview(into), offset=3, deadline=NEVER)

        assert into == b"3456"

    @pytest.mark.parametrize(("offset", "size"), [(0, 11), (8, 3), (10, 1), (50, 1)])
    def test_get_beyond_the_end_is_truncated(self, store: ObjectStore, offset: int, size: int) -> None:
        put(store, "run/a", b"0123456789")

        with pytest.raises(Truncated):
            store.get("run/a", memoryview(bytearray(size)), offset=offset, deadline=NEVER)

    def test_read_refuses_more_than_its_limit(self, store: ObjectStore) -> None:
        put(store, "run/a", b"0123456789")

        assert store.read("run/a", limit_bytes=10, deadline=NEVER) == b"0123456789"
        with pytest.raises(TooLarge):
            store.read("run/a", limit_bytes=9, deadline=NEVER)

    def test_stat_tells_size_and_a_true_sum_or_none(self, store: ObjectStore) -> None:
        put(store, "run/a", CHECK)

        info = store.stat("run/a", deadline=NEVER)

        assert (info.key, info.size) == ("run/a", 9)
        assert info.crc64nvme in (None, CHECK_CRC)

    @pytest.mark.parametrize("key", ["run/b", "run", "run/a/below", "other/a"])
    def test_an_absent_object_is_not_found(self, store: ObjectStore, key: str) -> None:
        put(store, "run/a")

        with pytest.raises(NotFound):
            store.get(key, memoryview(bytearray(1)), deadline=NEVER)
        with pytest.raises(NotFound):
            read(store, key)
        with pytest.raises(NotFound):
            store.stat(key, deadline=NEVER)

    # -------------------------------------------------------------------------------------------------- put_if_absent

    def test_put_if_absent_succeeds_once(self, store: ObjectStore) -> None:
        store.put_if_absent("run/commit", b"first", deadline=NEVER)

        with pytest.raises(AlreadyExists):
            store.put_if_absent("run/commit", b"second", deadline=NEVER)
        assert read(store, "run/commit") == b"first"
        assert keys(store) == ["run/commit"]

    def test_put_if_absent_of_the_same_bytes_is_refused_as_well(self, store: ObjectStore) -> None:
        store.put_if_absent("run/claim", b"same", deadline=NEVER)

        with pytest.raises(AlreadyExists):
            store.put_if_absent("run/claim", b"same", deadline=NEVER)

    def test_one_of_many_threads_wins_a_key(self, store: ObjectStore) -> None:
        threads = 8
        start = threading.Barrier(threads)

        def claim(number: int) -> list[int]:
            won = []
            for race in range(10):
                start.wait(timeout=HANG_S)
                try:
                    store.put_if_absent(f"run/{race}", b"%d" % number, deadline=NEVER)
                    won.append(race)
                except AlreadyExists:
                    pass
            return won

        with ThreadPoolExecutor(threads) as pool:
            won = list(pool.map(claim, range(threads)))

        assert sorted(race for races in won for race in races) == list(range(10))
        for number, races in enumerate(won):
            assert all(read(store, f"run/{race}") == b"%d" % number for race in races)

    def test_a_key_may_be_taken_again_after_delete(self, store: ObjectStore) -> None:
        store.put_if_absent("run/a", b"first", deadline=NEVER)
        store.delete("run/a", deadline=NEVER)

        store.put_if_absent("run/a", b"second", deadline=NEVER)

        assert read(store, "run/a") == b"second"

    # ------------------------------------------------------------------------------------------------------------ copy

    def test_a_copy_is_an_object_of_its_own_or_is_refused(self, store: ObjectStore) -> None:
        receipt = put(store, "run/a/1", CHECK)

        try:
            store.copy("run/a/1", "run/b/1", receipt, deadline=NEVER)
        except CannotCopy:
            assert keys(store) == ["run/a/1"]
            return
        store.delete("run/a/1", deadline=NEVER)

        assert keys(store) == ["run/b/1"]
        assert read(store, "run/b/1") == CHECK
        put(store, "run/b/1", b"replaced")
        assert read(store, "run/b/1") == b"replaced"

    def test_replacing_or_deleting_a_copy_leaves_its_source(self, store: ObjectStore) -> None:
        receipt = put(store, "run/a", CHECK)
        with contextlib.suppress(CannotCopy):
            store.copy("run/a", "run/b", receipt, deadline=NEVER)
            store.copy("run/a", "run/c", receipt, deadline=NEVER)

        put(store, "run/b", b"another")
        store.delete("run/c", deadline=NEVER)

        assert keys(store) == ["run/a", "run/b"]
        assert (read(store, "run/a"), read(store, "run/b")) == (CHECK, b"another")

    def test_a_copy_that_is_there_already_succeeds_and_another_object_is_replaced_or_refused(
        self, store: ObjectStore
    ) -> None:
        receipt = put(store, "run/a", CHECK)
        put(store, "run/b", b"another")

        with contextlib.suppress(CannotCopy):
            store.copy("run/a", "run/b", receipt, deadline=NEVER)
            assert read(store, "run/b") == CHECK
        with contextlib.suppress(CannotCopy):
            store.copy("run/a", "run/c", receipt, deadline=NEVER)
            store.copy("run/a", "run/c", receipt, deadline=NEVER)
            assert read(store, "run/c") == CHECK

        assert set(keys(store)) <= {"run/a", "run/b", "run/c"}
        assert read(store, "run/b") in (CHECK, b"another")

    def test_a_source_of_another_size_is_not_copied(self, store: ObjectStore) -> None:
        put(store, "run/a", CHECK)

        with pytest.raises((CopyDiffers, CannotCopy)):
            store.copy("run/a", "run/b", Receipt(8, CHECK_CRC, (CHECK_CRC,)), deadline=NEVER)

        assert keys(store) == ["run/a"]

    def test_a_source_of_another_sum_is_not_copied_by_a_store_that_keeps_sums(self, store: ObjectStore) -> None:
        put(store, "run/a", CHECK)
        if not self.keeps_sums:
            assert store.stat("run/a", deadline=NEVER).crc64nvme is None
            return

        with pytest.raises(CopyDiffers):
            store.copy("run/a", "run/b", Receipt(9, 1, (1,)), deadline=NEVER)

        assert keys(store) == ["run/a"]

    @pytest.mark.parametrize("source", ["run/absent", "run", "run/a/below", "absent/a"])
    def test_what_is_not_there_is_not_copied(self, store: ObjectStore, source: str) -> None:
        receipt = put(store, "run/a", CHECK)

        with pytest.raises(NotFound):
            store.copy(source, "run/b", receipt, deadline=NEVER)

        assert keys(store) == ["run/a"]

    # ------------------------------------------------------------------------------------------------------------ list

    def test_keys_are_listed_in_code_point_order(self, store: ObjectStore) -> None:
        unordered = ["b/x", "a/b", "a.json", "a-1/z", "a0", "B", "a/c/d", "a/c.json", "_x", "a=1", "a+1"]
        for key in unordered:
            put(store, key, key.encode())

        infos = list(store.list("", deadline=NEVER))

        assert [info.key for info in infos] == sorted(unordered)
        assert [info.size for info in infos] == [len(key) for key in sorted(unordered)]

    @pytest.mark.parametrize(
        ("prefix", "found"),
        [
            ("run/", ["run/a/1", "run/a/2", "run/ab", "run/b/1"]),
            ("run", ["run/a/1", "run/a/2", "run/ab", "run/b/1", "run2/a"]),
            ("run/a", ["run/a/1", "run/a/2", "run/ab"]),
            ("run/a/", ["run/a/1", "run/a/2"]),
            ("run/a/2", ["run/a/2"]),
            ("run/a/2/", []),
            ("run/c/", []),
            ("nobody/", []),
        ],
    )
    def test_a_prefix_is_text_not_a_directory(self, store: ObjectStore, prefix: str, found: list[str]) -> None:
        for key in ("run/a/1", "run/a/2", "run/ab", "run/b/1", "run2/a"):
            put(store, key)

        assert keys(store, prefix) == found

    @pytest.mark.parametrize("after", ["", "a", "a/", "a/b", "a/b/c", "a/b/d", "a/b/zz", "a0", "b/x", "c"])
    def test_after_gives_what_is_greater(self, store: ObjectStore, after: str) -> None:
        everything = ["a.json", "a/b/c", "a/b/e", "a/c", "a0", "b/x"]
        for key in everything:
            put(store, key)

        assert keys(store, "", after) == [key for key in everything if key > after]

    def test_an_object_deleted_while_listing_breaks_nothing(self, store: ObjectStore) -> None:
        for key in ("a/1", "b/1", "c/1"):
            put(store, key)

        listing = store.list("", deadline=NEVER)
        first = next(listing)
        store.delete("b/1", deadline=NEVER)
        rest = [info.key for info in listing]

        assert first.key == "a/1"
        assert rest in (["c/1"], ["b/1", "c/1"])

    # ---------------------------------------------------------------------------------------------------------- delete

    def test_a_deleted_object_is_gone(self, store: ObjectStore) -> None:
        put(store, "run/a/1")
        put(store, "run/b")

        store.delete("run/a/1", deadline=NEVER)

        assert keys(store) == ["run/b"]
        with pytest.raises(NotFound):
            read(store, "run/a/1")

    @pytest.mark.parametrize("key", ["nobody", "run", "run/b", "run/a/below"])
    def test_deleting_what_is_absent_succeeds_and_deletes_nothing(self, store: ObjectStore, key: str) -> None:
        put(store, "run/a")

        store.delete(key, deadline=NEVER)

        assert keys(store) == ["run/a"]

    def test_puts_and_deletes_beside_each_other_do_not_disturb(self, store: ObjectStore) -> None:
        """Deleting the last object of a directory must not pull it away from under a put."""

        def churn(number: int) -> None:
            for turn in range(15):
                key = f"run/deep/er/{number}-{turn}"
                store.put_if_absent(key, b"x", deadline=NEVER)
                assert read(store, key) == b"x"
                store.delete(key, deadline=NEVER)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))

        assert keys(store) == []

    # -------------------------------------------------------------------------------------------------- keys, deadlines

    @pytest.mark.parametrize("key", NO_KEYS)
    def test_what_is_no_key_is_refused_everywhere(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(ValueError, match="not a store key"):
            put(store, key)
        with pytest.raises(ValueError, match="not a store key"):
            store.put_if_absent(key, b"", deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            store.copy(key, "run/a", Receipt(0, 0, ()), deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            store.copy("run/a", key, Receipt(0, 0, ()), deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            store.get(key, memoryview(bytearray(1)), deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            read(store, key)
        with pytest.raises(ValueError, match="not a store key"):
            store.stat(key, deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            store.delete(key, deadline=NEVER)
        with pytest.raises(ValueError, match="not a store key"):
            store.local_path(key)

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//", "a/."])
    def test_what_no_key_starts_with_is_no_prefix(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(ValueError, match="not a store key"):
            store.list(prefix, deadline=NEVER)

    def test_after_the_deadline_nothing_becomes_visible(self, store: ObjectStore) -> None:
        with pytest.raises(Unavailable):
            store.put("run/a", memoryview(b"late"), deadline=PAST)
        with pytest.raises(Unavailable):
            store.put_if_absent("run/b", b"late", deadline=PAST)

        assert keys(store) == []

    def test_after_the_deadline_nothing_is_copied(self, store: ObjectStore) -> None:
        receipt = put(store, "run/a", CHECK)

        with pytest.raises(Unavailable):
            store.copy("run/a", "run/b", receipt, deadline=PAST)

        assert keys(store) == ["run/a"]

    def test_a_get_ends_at_its_deadline(self, store: ObjectStore) -> None:
        put(store, "run/a", b"bytes")

        with pytest.raises(Unavailable):
            store.get("run/a", memoryview(bytearray(5)), deadline=PAST)

    # ------------------------------------------------------------------------------------------------------------ files

    def test_a_local_path_holds_exactly_the_object(self, store: ObjectStore) -> None:
        put(store, "run/a", b"bytes")

        path = store.local_path("run/a")

        assert path is None or path.read_bytes() == b"bytes"

    def test_a_reservation_is_given_back_by_reserving_nothing(self, store: ObjectStore) -> None:
        store.reserve(1 << 20)
        put(store, "run/a")
        store.reserve(0)

        assert keys(store) == ["run/a"]

    def test_close_may_be_called_twice(self, store: ObjectStore) -> None:
        store.close()
        store.close()
