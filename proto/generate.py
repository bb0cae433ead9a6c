"""Turns the contract into Python, and into the image that `buf` checks.

    python proto/generate.py                     writes libs/tickwheel/**/*_pb2*.py and .pyi
    python proto/generate.py --into FOLDER       the same elsewhere (a test compares)
    python proto/generate.py --image FILE        a descriptor set with imports and comments, for `buf`

The proto package is the folder is the Python import path, so what comes out is imported as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PROTO = Path(__file__).resolve().parent
LIBS = PROTO.parent / "libs"

PACKAGES = ("tickwheel/v1", "tickwheel/internal", "tickwheel/internal/v1")
MYPY_OPTIONS = "quiet,readable_stubs"

# googleapis-common-protos ships this file under another name than the one that everybody imports it by.
LONGRUNNING = ("google/longrunning/operations_proto.proto", "google/longrunning/operations.proto")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=LIBS)
    parser.add_argument("--image", type=Path)
    arguments = parser.parse_args()
    if arguments.image is not None:
        write_image(arguments.image)
    else:
        generate(arguments.into)


def generate(into: Path) -> None:
    """Messages for every file, services where there are some, stubs for both; stale output goes."""
    files = proto_files()
    with_services = [
        file for file in files if re.search(r"^service ", (PROTO / file).read_text(), re.MULTILINE)
    ]
    plugins = [
        f"--plugin={name}={scripts_folder() / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    with tempfile.TemporaryDirectory(prefix="tickwheel-proto-") as temporary:
        fresh = Path(temporary)
        protoc([*plugins, f"--python_out={fresh}", f"--mypy_out={MYPY_OPTIONS}:{fresh}"], files)
        protoc(
            [*plugins, f"--grpc_python_out={fresh}", f"--mypy_grpc_out={MYPY_OPTIONS}:{fresh}"], with_services
        )
        for package in PACKAGES:
            (into / package).mkdir(parents=True, exist_ok=True)
            (into / package / "__init__.py").touch()
            for stale in (into / package).glob("*_pb2*"):
                stale.unlink()
            for made in (fresh / package).glob("*_pb2*"):
                shutil.move(made, into / package / made.name)


def write_image(image: Path) -> None:
    image.parent.mkdir(parents=True, exist_ok=True)
    protoc([f"--descriptor_set_out={image}", "--include_imports", "--include_source_info"], proto_files())


def proto_files() -> list[str]:
    return sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("tickwheel/**/*.proto"))


def protoc(outputs: list[str], files: list[str]) -> None:
    with include_folders() as folders:
        includes = [f"--proto_path={folder}" for folder in folders]
        # A fresh process: protoc cannot run twice in one.
        done = subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", *includes, *outputs, *files], check=False
        )
    if done.returncode != 0:
        sys.exit(done.returncode)


@contextmanager
def include_folders() -> Iterator[list[Path]]:
    """Ours, protobuf's own, and googleapis-common-protos', the one renamed file under its right name."""
    common = site_folder("google.api.annotations_pb2").parents[1]
    bundled = site_folder("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory(prefix="tickwheel-proto-") as temporary:
        renamed = Path(temporary)
        source, target = LONGRUNNING
        (renamed / target).parent.mkdir(parents=True)
        shutil.copy(common / source, renamed / target)
        yield [PROTO, bundled, renamed, common]


def scripts_folder() -> Path:
    """Where the environment's commands lie; protoc would look for its plugins on PATH only."""
    return Path(sysconfig.get_path("scripts"))


def site_folder(module: str) -> Path:
    """The folder in which an installed module's file lies."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"{module} is not installed: run `make setup` first")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
