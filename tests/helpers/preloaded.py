"""What the ranks of tests import, imported once: `tests.helpers.ranks` forks each rank from a process that holds this.

The imports take seven seconds of CPU time, and the tests start several hundred ranks.
"""

from tango_hpc.models.engine.engine import import_vllm

import_vllm("cpu")
