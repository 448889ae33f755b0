"""What an engine rank takes and what it refuses, without an engine: plain parameters, a real store."""

import hashlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from slimerl.engine.inside import patch
from slimerl.engine.inside.delta import encode, find_changes, units
from slimerl.engine.inside.packed import BucketError
from slimerl.engine.inside.patch import Part, base_of, held, pack_patch, receive_patch, remember

OLD = torch.tensor([1.0, 2.0, 3.0, 4.0])
NEW = torch.tensor([1.0, 2.5, 3.0, -4.0])
DIGESTS = {"model.norm.weight": 2**64 - 3, "model.embed_tokens.weight": 5}


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        yield TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
            master_listen_fd=listener.detach(),
        )


@pytest.fixture(autouse=True)
def a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "_rank", patch._Rank())


class Live:
    """A rank with one parameter, proven to hold version 7."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.norm = OLD.clone()
        remember(7, DIGESTS)

    def receive(self, base: Any, number: int = 0, body: bytes | None = None, **other: Any) -> dict[str, Any]:
        form = "whole" if base is None else "steps"
        if body is None:
            body = bytes(NEW.numpy().data) if base is None else encode(find_changes(units(OLD), units(NEW)))
        part: Part = {
            "parameter": "norm",
            "at": [[0], [4]],
            "shape": [4],
            "dtype": "float32",
            "form": form,
            "nbytes": len(body),
        }
        packed = pack_patch([(part, body)])
        half = len(packed) // 2
        self._store.set("a", bytes(packed[:half]))
        self._store.set("b", bytes(packed[half:]))
        parcel = {"keys": ["a", "b"], "nbytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
        message = {"session": "one", "number": number, "base": base, "parcel": parcel | other.pop("parcel", {})}
        return receive_patch({"norm": self.norm}, message | other, self._store)

    def refuses(self, why: str, *args: Any, **other: Any) -> None:
        before = self.norm.clone()
        assert why in self.receive(*args, **other)["refused"]
        assert torch.equal(self.norm, before)
        assert held() is None, "it cannot be taken for the base any more"


BASE = base_of(7, DIGESTS)


def test_changes_of_what_it_holds_are_written_and_it_holds_no_proven_version_until_the_next_proof(
    store: TCPStore,
) -> None:
    live = Live(store)
    assert held() == BASE == {"version": 7, "digest": 2}
    assert live.receive(BASE) == {}
    assert torch.equal(live.norm, NEW)
    assert held() is None
    remember(8, DIGESTS)
    assert held() == {"version": 8, "digest": 2}


@pytest.mark.parametrize("base", [{"version": 6, "digest": 2}, {"version": 7, "digest": 3}])
def test_w2_changes_of_another_version_or_other_weights_are_refused(store: TCPStore, base: Any) -> None:
    """Fault: a sender that believes in another base. Added to these weights, its steps make none that ever were."""
    Live(store).refuses(f"it changes version {base['version']} (digest ", base)


def test_w2_changes_are_refused_once_something_else_was_written(store: TCPStore) -> None:
    """Fault: another transport's bucket came in between."""
    live = Live(store)
    patch.forget()
    live.refuses("here lies no proven version", BASE)


def test_w2_a_patch_that_comes_without_those_before_it_is_refused(store: TCPStore) -> None:
    """Fault: the second patch of an update is lost; or the first belongs to another update."""
    live = Live(store)
    live.receive(BASE)
    live.refuses("those before it were not all applied", BASE, number=2)
    live = Live(store)
    live.receive(BASE)
    live.refuses("those before it were not all applied", BASE, number=1, session="another")


def test_w12_other_bytes_than_were_sent_are_refused_before_anything_is_written(store: TCPStore) -> None:
    """Fault: a byte is another one, or the end is missing."""
    for base in (BASE, None):
        live = Live(store)
        live.refuses("not those that were sent (SHA-256)", base, parcel={"sha256": "0" * 64})
        live = Live(store)
        live.refuses("bytes came", base, parcel={"keys": ["a"]})


def test_a_refused_patch_is_not_made_up_for_by_the_next_one(store: TCPStore) -> None:
    live = Live(store)
    live.receive(BASE)
    live.refuses("SHA-256", BASE, number=1, parcel={"sha256": "0" * 64})
    live.refuses("those before it", BASE, number=1)
    live.refuses("those before it", BASE, number=2)


def test_a_whole_rewrite_needs_no_base(store: TCPStore) -> None:
    live = Live(store)
    patch.forget()
    assert live.receive(None, number=5) == {}
    assert torch.equal(live.norm, NEW)


def test_bytes_that_are_no_delta_of_the_parameter_are_an_error_naming_it(store: TCPStore) -> None:
    """Fault: the sender's plan gives the tensor another size."""
    longer = encode(find_changes(units(torch.zeros(9)), units(torch.ones(9))))
    with pytest.raises(BucketError, match="norm: no delta of 4 elements of 4 bytes"):
        Live(store).receive(BASE, body=longer)
    with pytest.raises(BucketError, match="norm: 12 bytes for 4 elements of float32"):
        Live(store).receive(None, body=bytes(12))
