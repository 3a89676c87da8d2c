"""Asynchronous methods, each a `Rule`: the reactions of a worker and of the server to messages.

`optimizer` is any optax transformation. Rules in `server` have a parameter server, which applies it; in the others
each worker applies it to its own model, or all workers to a replicated one. An argument that is out of its range raises
`ValueError`.
"""

from .collective.any_batch import any_batch as any_batch
from .collective.ata import ata as ata
from .collective.bsp import bsp as bsp
from .collective.dasgd import dasgd as dasgd
from .collective.delay_by_one import delay_by_one as delay_by_one
from .collective.lasgd import lasgd as lasgd
from .collective.local_sgd import local_sgd as local_sgd
from .collective.palsgd import palsgd as palsgd
from .collective.pipe_sgd import pipe_sgd as pipe_sgd
from .collective.task_allocation import task_allocation as task_allocation
from .compressed import compressed as compressed
from .peers.ad_psgd import ad_psgd as ad_psgd
from .peers.any_batch_gossip import any_batch_gossip as any_batch_gossip
from .peers.choco_exchange import choco_exchange as choco_exchange
from .peers.d_psgd import d_psgd as d_psgd
from .peers.exchange import Exchange as Exchange
from .peers.hierarchical_ad_psgd import hierarchical_ad_psgd as hierarchical_ad_psgd
from .peers.hop import hop as hop
from .peers.power_gossip import power_gossip as power_gossip
from .peers.prague import prague as prague
from .peers.whole_models import whole_models as whole_models
from .server.asgd import asgd as asgd
from .server.backup_workers import backup_workers as backup_workers
from .server.dc_asgd import dc_asgd as dc_asgd
from .server.delay_adaptive import delay_adaptive as delay_adaptive
from .server.dude import dude as dude
from .server.malenia import malenia as malenia
from .server.rennala import rennala as rennala
from .server.ringleader import ringleader as ringleader
from .server.ringmaster import ringmaster as ringmaster
from .server.ssp import ssp as ssp
from .server.staleness_aware import staleness_aware as staleness_aware
