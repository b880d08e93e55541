"""Types of the arrays in answers, in a module of their own because numpy takes long to import."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.int32]
LogprobArray = NDArray[np.float32]
