"""Static plans of what travels when. No devices."""

from .ada_comm import AdaComm as AdaComm
from .ada_comm import AdaCommState as AdaCommState
from .ada_comm import ada_comm as ada_comm
from .buckets import assign_buckets as assign_buckets
from .optimum import bound as bound
from .optimum import optimum as optimum
from .periods import constant as constant
from .periods import doubling as doubling
from .periods import linear as linear
from .periods import post_local as post_local
from .periods import proportional_steps as proportional_steps
from .periods import quadratic as quadratic
from .pipelined import choose_defer as choose_defer
from .pipelined import pipelined_time as pipelined_time
from .profile import Profile as Profile
from .profile import profile_of as profile_of
from .timeline import Message as Message
from .timeline import Timeline as Timeline
from .timeline import timeline as timeline
from .windows import anytime_window as anytime_window
from .windows import processed as processed
from .windows import shifted_exponential as shifted_exponential
