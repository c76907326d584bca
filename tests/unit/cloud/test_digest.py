"""CRC-64/NVME, pinned by the catalogue's values."""

from __future__ import annotations

import pytest

from cloud.digest import Digester, combine, crc64nvme, format_crc, parse_crc
from cloud.store import CHUNK_BYTES, Receipt

CHECK = b"123456789"
CHECK_CRC = 0xAE8B14860A799888


def test_the_check_value_is_the_catalogues() -> None:
    assert crc64nvme(CHECK) == CHECK_CRC


def test_4096_zeros_have_the_sum_that_the_nvme_specification_prints() -> None:
    assert crc64nvme(bytes(4096)) == 0x6482D367EB22B64E


def test_a_sum_can_be_continued() -> None:
    assert crc64nvme(b"6789", previous=crc64nvme(b"12345")) == CHECK_CRC


def test_sums_of_pieces_combine_to_the_sum_of_the_whole() -> None:
    assert combine(crc64nvme(CHECK[:4]), crc64nvme(CHECK[4:]), 5) == CHECK_CRC


def test_a_sum_is_written_with_sixteen_digits() -> None:
    assert format_crc(CHECK_CRC) == "ae8b14860a799888"
    assert format_crc(10) == "000000000000000a"
    assert parse_crc("000000000000000a") == 10


@pytest.mark.parametrize(
    "text", ["", "a", "AE8B14860A799888", "0xae8b14860a7998", "ae8b14860a7998880", "ae8b14860a79988 "]
)
def test_any_other_spelling_of_a_sum_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a CRC-64"):
        parse_crc(text)


def test_nothing_has_no_chunks() -> None:
    assert Digester().receipt() == Receipt(0, 0, ())


@pytest.mark.parametrize("piece_bytes", [CHUNK_BYTES // 3, CHUNK_BYTES, 2 * CHUNK_BYTES + 9])
def test_chunks_do_not_depend_on_the_pieces(piece_bytes: int) -> None:
    data = memoryview(bytes(2 * CHUNK_BYTES) + CHECK)
    digester = Digester()

    for at in range(0, len(data), piece_bytes):
        digester.update(data[at : at + piece_bytes])

    zeros = crc64nvme(bytes(CHUNK_BYTES))
    assert digester.receipt() == Receipt(len(data), crc64nvme(data), (zeros, zeros, CHECK_CRC))
