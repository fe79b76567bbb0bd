"""What the laboratory uses of the library beyond its public names. No other module of it imports such.

``BACKENDS``, ``check_backend``: ``mixnorm bench --backend`` takes what a layer takes, and refuses what cannot run here.
``Form``, ``Mixture``, ``Parameters``, ``kernels_for``: errors are measured of the kernels alone, with a mixture that no fit
has made; and ghost batch norm is a mixture norm of one component for each group.
``no_autocast``, ``compute_dtype``: its statistics, as a layer's, are in fp32 at least.
``look_of``: these kernels want points, as the layers cut them out of images.
``WITH_HISTORY``: the snapshots in a record are of mixtures that belong to a layer, and not to a single image.
``left_out``: a comparison tells which batch norms ``convert`` leaves as they are, and why.
``DEFAULT_MIN_VARIANCE``: ``mixnorm inspect`` fits mixtures with the floor that the layers have.
"""

from mixnorm.functional import no_autocast
from mixnorm.gmm import DEFAULT_MIN_VARIANCE
from mixnorm.ops.choose import BACKENDS, check_backend, kernels_for
from mixnorm.ops.kernels import Form, Mixture, Parameters, compute_dtype
from mixnorm.populations import WITH_HISTORY, look_of
from mixnorm.select import left_out

__all__ = [
    "BACKENDS",
    "DEFAULT_MIN_VARIANCE",
    "WITH_HISTORY",
    "Form",
    "Mixture",
    "Parameters",
    "check_backend",
    "compute_dtype",
    "kernels_for",
    "left_out",
    "look_of",
    "no_autocast",
]
