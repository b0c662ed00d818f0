"""Assemble results, code and systems as an MLPerf submission: <submitter>/{benchmarks,results,systems}.

PATH is a run set, results/<system>/<resnet|bert>, or a folder of run sets; a set has exactly 5 runs (resnet)
or 10 (bert). A sealed set has more if faults ended runs: the runs that the score counts keep their names, the
others are packaged as uncounted_result_N.txt. The code is taken from the commit that the logs name, the
description from systems/<system>.json beside results/.

It is written only if there is no finding: no error of our audit, none of the official package and repository
checkers (rulesets 2.0.0, 2.1.0 and 4.0.0 for resnet, 2.1.0 and 5.0.0 for bert: those of the published runs,
and the last that had the benchmark), no key, token, login, address, host name, home folder or placeholder in
any file. A finding is one line with file:line and its kind, never the secret itself. Fields of the system's
description that are still open are named. An existing output stays as it is, and equal inputs make equal
bytes.

examples:
  ttt export results/8xA100-optimized --to submission --submitter Example --out Example.tar.gz
  ttt export results/8xA100-optimized/bert --to submission --submitter Example --list
  ttt export results/my-laptop-mini-optimized --to submission --submitter Example --rehearsal --out new
"""

import argparse
from pathlib import Path

from common.arguments import add_shared
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.log import load
from common.evidence.records import counted, printable
from common.evidence.submission.package import NAME, REHEARSAL, Request, assemble, refuse_existing, write
from common.repository import ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sets = "run sets, or folders of run sets"
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=sets)
    parser.add_argument("--submitter", required=True, metavar="NAME", help="submission.org of the logs")
    add_shared(parser, "--out", help="a new folder, or a new NAME.tar.gz", metavar="FOLDER_OR_TAR")
    listed = "print sha256, bytes and path of each file, and write no file"
    parser.add_argument("--list", "--dry-run", action="store_true", help=listed)
    marked = "also take size mini; every file and the folder's name are marked"
    parser.add_argument("--rehearsal", action="store_true", help=marked)
    folder = "folder of the code in the package"
    parser.add_argument("--implementation", default="time-to-train", metavar="NAME", help=folder)
    add_shared(parser, "--systems")
    code = "commit whose code is published; default: the one in the logs"
    parser.add_argument("--commit", default="", metavar="COMMIT", help=code)


def main(args: argparse.Namespace) -> int:
    for option, name in (("--submitter", args.submitter), ("--implementation", args.implementation)):
        if not NAME.fullmatch(name):
            raise UserError(f"'{printable(name, 64)}' is not {NAME.pattern}", where=option)
    if args.list == (args.out is not None):
        raise UserError("say where to: --out FOLDER_OR_TAR, or --list to see what would be published")
    if args.out is not None:
        refuse_existing(args.out)
    request = Request(
        submitter=args.submitter,
        implementation=args.implementation,
        repository=ROOT,
        revision=args.commit,
        is_rehearsal=args.rehearsal,
    )
    package = assemble(load(args.paths, systems=args.systems), request)
    for line in package.notes + package.findings:
        print(printable(line, 500))
    if package.findings:
        print(f"{counted(len(package.findings), 'finding')}; nothing was written")
        return EXIT_FINDINGS
    size = f"{len(package.items)} files, {sum(num_bytes for _, num_bytes, _ in package.listing):,} bytes"
    if args.rehearsal:
        size += f" ({REHEARSAL})"
    if args.out is None:
        for path, num_bytes, digest in package.listing:
            print(f"{digest} {num_bytes:>9} {path}")
        print(f"{size}; nothing was written")
        return EXIT_OK
    write(package, args.out)
    print(f"wrote {printable(str(args.out))}: {package.folder}, {size}; listed in {package.folder}.sha256")
    return EXIT_OK
