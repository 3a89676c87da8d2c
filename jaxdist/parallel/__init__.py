"""Running a step written as one worker sees it: on a mesh, or simulated."""

from .agreement import disagreement as disagreement
from .any_batch import any_batch as any_batch
from .cross_gradients import cross_value_and_grad as cross_value_and_grad
from .cross_gradients import neighbourhood_value_and_grad as neighbourhood_value_and_grad
from .cross_gradients import sharpness_aware as sharpness_aware
from .distribute import distribute as distribute
from .distribute import evaluate as evaluate
from .gathered import gathered as gathered
from .gathered import gathered_scan as gathered_scan
from .gathered import shard as shard
from .grads import local_value_and_grad as local_value_and_grad
from .initialize import initialize as initialize
from .join import join as join
from .layers import forward_order as forward_order
from .mesh import global_batch as global_batch
from .mesh import make_mesh as make_mesh
from .mesh import use_cpu_devices as use_cpu_devices
from .pipelined import Pipelined as Pipelined
from .pipelined import PipelinedState as PipelinedState
from .pipelined import pipelined as pipelined
from .same import assert_same as assert_same
from .same import broadcast as broadcast
from .simulate import simulate as simulate
from .unused import unused as unused
