"""The kernels as functions of a backend, for the tests that hold one implementation against another."""

from mixnorm.ops import autograd, fit
from mixnorm.ops.choose import kernels_for
from mixnorm.ops.kernels import AS_THEY_ARE, Form, History, Mixture, Parameters, are_per_feature, compute_dtype  # noqa: F401


def split(options):
    """The parameters and the form that options of a transform stand for."""
    learned = {name: options.pop(name) for name in ("within", "between", "deviation") if name in options}
    return learned, Form(**options)


def sample_and_fit(points, size, draws, num_components, *, backend="auto", **options):
    kernels = kernels_for(points, num_components, backend)
    return kernels.sample_and_fit(points, size, draws, num_components, fit.Options(**options))


def em(sample, mixture, *, iterations, min_variance, min_weight, backend="auto"):
    kernels = kernels_for(sample.unsqueeze(2), mixture[0].shape[1], backend)
    return kernels.em(sample, Mixture(*mixture), iterations, fit.Options(0, 0, min_variance, min_weight))


def em_step(points, mixture, *, history=None, backend="auto"):
    kernels = kernels_for(points, mixture[0].shape[1], backend)
    resp, found = kernels.em_step(points, Mixture(*mixture))
    if history is not None:
        kernels.push(Mixture(*history[0]), found, history[1])
    return resp, found


def normalize(points, resp, weight, bias, *, statistics=None, backend="auto", **options):
    learned, form = split(options)
    parameters = Parameters(weight, bias, **learned)
    per_feature = form.component_affine or are_per_feature(parameters, points)
    kernels = kernels_for(points, resp.shape[2], backend, per_feature=per_feature)
    if statistics is not None and isinstance(kernels, autograd.FastKernels):
        work = autograd.Work(kernels, form, AS_THEY_ARE, lambda _: (resp, Mixture(*statistics)), [])
        return autograd.Transform.apply(points, *parameters, work)
    return kernels.normalize(points, resp, parameters, form)


def transform_batch(points, mixture, weight, bias, *, history=None, backend="auto", **options):
    learned, form = split(options)
    parameters = Parameters(weight, bias, **learned)
    per_feature = form.component_affine or are_per_feature(parameters, points)
    kernels = kernels_for(points, mixture[0].shape[1], backend, per_feature=per_feature)
    y, found = kernels.transform(points, Mixture(*mixture), parameters, form)
    if history is not None:
        kernels.push(Mixture(*history[0]), found, history[1])
    return y, found


def inference(points, weights, means, variances, tau, weight, bias, *, mode, bounded=False, backend="auto", **options):
    learned, form = split(options)
    parameters = Parameters(weight, bias, **learned)
    per_feature = form.component_affine or are_per_feature(parameters, points)
    kernels = kernels_for(points, weights.shape[2], backend, per_feature=per_feature, mode=mode)
    history = History(weights, means, variances, tau, mode, bounded)
    return kernels.inference(points, history, parameters, form)


def push(queues, newest, tracked, *, backend="auto"):
    kernels = kernels_for(newest[1].unsqueeze(2), newest[0].shape[1], backend)
    kernels.push(Mixture(*queues), Mixture(*newest), tracked)


def slot_weights(weights, decay, *, backend="auto"):
    return kernels_for(weights.unsqueeze(-1), weights.shape[-1], backend).slot_weights(weights, decay)
