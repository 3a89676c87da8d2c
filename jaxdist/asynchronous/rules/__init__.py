"""Asynchronous methods, each a `Rule`: what a worker and the server do when something arrives."""

from .asgd import asgd as asgd
from .asgd import delay_adaptive as delay_adaptive
from .asgd import staleness_aware as staleness_aware
from .bsp import BackupState as BackupState
from .bsp import BSPState as BSPState
from .bsp import backup_workers as backup_workers
from .bsp import bsp as bsp
from .compressed import CompressedState as CompressedState
from .compressed import compressed as compressed
from .dc_asgd import DCASGDState as DCASGDState
from .dc_asgd import dc_asgd as dc_asgd
from .dude import DuDeState as DuDeState
from .dude import dude as dude
from .hop import HopState as HopState
from .hop import hop as hop
from .rennala import malenia as malenia
from .rennala import rennala as rennala
from .ringleader import RingleaderState as RingleaderState
from .ringleader import ringleader as ringleader
from .ringmaster import ringmaster as ringmaster
from .ssp import SSPState as SSPState
from .ssp import ssp as ssp
