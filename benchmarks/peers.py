"""What other systems have published, on their problems: BlueFog's tutorial with the rules of `jaxdist.decentralized`.

    python benchmarks/peers.py --out benchmarks/reports/NAME

Two least-squares problems whose figures are the published results, on many draws of the data; see
`peer_workers/consensus.py`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from peer_workers import consensus, tables

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=30, help="of the data of gossip")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = {"gossip": consensus.measure(given.draws)}
    (given.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    command = [sys.executable, str(HERE / "environment.py"), "--out", str(given.out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (given.out / "README.md").write_text(tables.write(found))
    print(tables.write(found))


if __name__ == "__main__":
    main()
