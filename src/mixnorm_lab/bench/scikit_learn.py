"""The fit that scikit-learn would do, to compare with."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture


def fit(x: np.ndarray, num_components: int) -> None:
    """The steps of ``em_iters=2`` on x (m, D): greedy k-means++, one Lloyd iteration, its clusters' mixture, one of EM."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration is what is asked for
        labels = KMeans(num_components, n_init=1, max_iter=1, algorithm="lloyd", random_state=0).fit(x).labels_
        parts = [x[labels == k] for k in range(num_components)]
        GaussianMixture(
            num_components,
            covariance_type="diag",
            max_iter=1,
            tol=0,
            weights_init=[len(part) / len(x) for part in parts],
            means_init=[part.mean(0) for part in parts],
            precisions_init=[1 / part.var(0) for part in parts],
        ).fit(x)
