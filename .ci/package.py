"""What the distributions hold: package.py SDIST compares a source distribution with git.

It holds the files that git tracks, byte for byte, without those whose path begins with a dot
(settings of tools), and its metadata. So what builds from a clean checkout builds from it.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

root = Path(__file__).parents[1]
listing = subprocess.run(
    ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
)
tracked = {name for name in listing.stdout.split("\0") if name and not name.startswith(".")}

with tarfile.open(sys.argv[1]) as archive:
    files = [member for member in archive.getmembers() if member.isfile()]
    contents = {
        member.name.split("/", 1)[1]: archive.extractfile(member).read() for member in files
    }

problems = [f"missing: {name}" for name in sorted(tracked - set(contents))]
problems += [
    f"not tracked by git: {name}" for name in sorted(set(contents) - tracked - {"PKG-INFO"})
]
problems += [
    f"differs: {name}"
    for name in sorted(tracked & set(contents))
    if contents[name] != (root / name).read_bytes()
]
if problems:
    sys.exit("\n".join([f"{sys.argv[1]} is not the tree of git:", *problems]))
print(f"{sys.argv[1]}: {len(contents)} files, as git has them")
