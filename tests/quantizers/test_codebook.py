"""Lloyd-Max codebooks against Max's table, closed forms and the optimality conditions."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from semkv_bench.quantizers.codebook import lloyd_max

# J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6 (1960), table I: mean squared error.
MAX_ERRORS = {2: 0.3634, 3: 0.1902, 4: 0.1175, 5: 0.07994, 6: 0.05798, 7: 0.04400, 8: 0.03454, 16: 0.009497}
# ... and output levels, of the positive half.
MAX_CENTROIDS = {
    2: [0.7980],
    3: [0, 1.224],
    4: [0.4528, 1.510],
    5: [0, 0.7646, 1.724],
    8: [0.2451, 0.7560, 1.344, 2.152],
}


@pytest.mark.parametrize("levels", MAX_ERRORS)
def test_gaussian_limit_is_max_table(levels):
    assert lloyd_max(levels, math.inf).mse == pytest.approx(MAX_ERRORS[levels], rel=5e-4)


@pytest.mark.parametrize("levels", MAX_CENTROIDS)
def test_gaussian_centroids_are_max_table(levels):
    positive = lloyd_max(levels, math.inf).centroids[levels // 2 :]
    assert positive == pytest.approx(MAX_CENTROIDS[levels], abs=6e-4)


def test_two_levels_have_a_closed_form():
    # Gaussian: centroid E|z| = sqrt(2/pi), error 1 - 2/pi.
    book = lloyd_max(2, math.inf)
    assert book.centroids == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], abs=1e-14)
    assert book.mse == pytest.approx(1 - 2 / math.pi, abs=1e-14)


@pytest.mark.parametrize("levels", [2, 3, 7, 16, 256])
def test_three_dimensions_are_uniform(levels):
    # A coordinate on the sphere in three dimensions is uniform: equal cells, error 1/L**2 of the variance.
    book = lloyd_max(levels, 3)
    width = 2 * math.sqrt(3) / levels
    assert np.diff(book.centroids) == pytest.approx(np.full(levels - 1, width), abs=1e-12)
    assert book.mse == pytest.approx(1 / levels**2, rel=1e-8)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("levels", [2, 3, 5, 8, 16])
def test_centroids_are_cell_means_by_numerical_integration(levels, head_dim):
    half = (head_dim - 1) / 2
    root = math.sqrt(head_dim)
    density = stats.beta(half, half, loc=-root, scale=2 * root).pdf
    book = lloyd_max(levels, head_dim)
    edges = [-root, *book.thresholds, root]
    error = 0.0
    for centroid, low, high in zip(book.centroids, edges[:-1], edges[1:], strict=True):
        mass, moment, lost = (
            integrate.quad(f, low, high, epsabs=1e-13, epsrel=1e-12)[0]
            for f in (
                density,
                lambda z: z * density(z),
                lambda z, c=centroid: (z - c) ** 2 * density(z),
            )
        )
        assert moment / mass == pytest.approx(centroid, abs=1e-10)
        error += lost
    assert error == pytest.approx(book.mse, abs=1e-10)
    assert book.thresholds == pytest.approx((book.centroids[1:] + book.centroids[:-1]) / 2, abs=1e-15)


def test_many_dimensions_approach_the_gaussian():
    for levels in (2, 5, 16):
        exact = lloyd_max(levels, math.inf).mse
        errors = [abs(lloyd_max(levels, d).mse - exact) for d in (64, 256, 1024)]
        assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_error_falls_with_every_level():
    for head_dim in (64, 128):
        errors = [lloyd_max(levels, head_dim).mse for levels in range(2, 257)]
        assert np.all(np.diff(errors) < 0)
