"""`disk`: engines read buckets as safetensors files, from a directory that they share with the trainer.

Flows in: buckets. Flows out: one file for each, there only while engines load it. Invariants: a file has its name only
once it is complete; it is never written to again; it goes when every engine left has answered for it, and the whole
directory with the update. Nothing is flushed to the medium: what a power cut leaves is never read.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from slimerl.engine.fleet import EngineFleet
from slimerl.engine.inside.packed import Entry, NamedTensor
from slimerl.resharding.transports.carrier import Carrier, SourceOfRank


class BucketNotWritten(OSError):
    """The disk does not take a bucket; the engines hold a part of the update."""


class DiskCarrier(Carrier):
    """`directory` belongs to the updates of one run; what an update that was killed left there is removed."""

    def __init__(self, fleet: EngineFleet, directory: Path, timeout_s: float) -> None:
        super().__init__(fleet, timeout_s)
        self.directory = directory.absolute() / secrets.token_hex(8)
        try:
            shutil.rmtree(directory, ignore_errors=True)
            self.directory.mkdir(parents=True, mode=0o700)
        except OSError as error:
            self.desk.close()
            raise BucketNotWritten(f"{self.directory} cannot be made: {error.strerror}") from None

    def _dispose(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _stage(self, number: int, bucket: Sequence[NamedTensor]) -> tuple[SourceOfRank, list[Entry]]:
        path, partial = self._path(number), self.directory / "partial"
        try:
            save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in bucket}, partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self.directory).free
            raise BucketNotWritten(
                f"{path}: a bucket of {sum(tensor.nbytes for _, tensor in bucket)} bytes cannot be written "
                f"({error}); {free} bytes are free there"
            ) from None
        entries: list[Entry] = [
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": 0,
            }
            for name, tensor in bucket
        ]
        return lambda: {"kind": "file", "path": str(path)}, entries

    def _settled(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.directory / f"bucket-{number:05}.safetensors"
