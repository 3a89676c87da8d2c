"""Asynchronous methods, each a `Rule`: the reactions of a worker and of the server to messages.

`optimizer` is any optax transformation. Rules in `server` have a parameter server, which applies it; in the others
each worker applies it to its own model, or all workers to a replicated one. An argument that is out of its range raises
`ValueError`.
"""

from .collective.local_sgd import dasgd as dasgd
from .collective.local_sgd import lasgd as lasgd
from .collective.local_sgd import local_sgd as local_sgd
from .collective.local_sgd import palsgd as palsgd
from .collective.synchronous import bsp as bsp
from .collective.synchronous import delay_by_one as delay_by_one
from .collective.synchronous import pipe_sgd as pipe_sgd
from .collective.uneven_rounds import any_batch as any_batch
from .collective.uneven_rounds import ata as ata
from .collective.uneven_rounds import task_allocation as task_allocation
from .compressed import compressed as compressed
from .peers.ad_psgd import ad_psgd as ad_psgd
from .peers.ad_psgd import hierarchical_ad_psgd as hierarchical_ad_psgd
from .peers.any_batch import any_batch_gossip as any_batch_gossip
from .peers.d_psgd import d_psgd as d_psgd
from .peers.exchange import Exchange as Exchange
from .peers.exchange import choco_exchange as choco_exchange
from .peers.exchange import power_gossip as power_gossip
from .peers.exchange import whole_models as whole_models
from .peers.hop import hop as hop
from .peers.prague import prague as prague
from .server.asgd import asgd as asgd
from .server.asgd import dc_asgd as dc_asgd
from .server.asgd import delay_adaptive as delay_adaptive
from .server.asgd import ringmaster as ringmaster
from .server.asgd import ssp as ssp
from .server.asgd import staleness_aware as staleness_aware
from .server.minibatch import backup_workers as backup_workers
from .server.minibatch import malenia as malenia
from .server.minibatch import rennala as rennala
from .server.tables import dude as dude
from .server.tables import ringleader as ringleader
