"""The tables of :mod:`epilogues.refusals`: by name of a torch function, why an epilogue cannot do it and what to do.

    >>> COMMUNICATING_BY_NAME["softmax"].name
    'normalisation'
    >>> EXPLAINED_BY_NAME["lgamma"]
    ('there is no device function for it in the operation table', ...)

What lets elements depend on each other has a :class:`Communication`; what is elementwise, or no operation on
elements at all, is explained one by one.  To explain a further function, add its name to a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Communication:
    """A way in which elements would depend on each other: its name, the reason, and the way out."""

    name: str
    why: str
    instead: str


_REDUCTION = Communication(
    "reduction",
    "each element of its result depends on many elements of its input, and other tiles compute those",
    "return the elements from the epilogue and call {op} on the GEMM's result; if the reduced values are "
    "known before the GEMM, give them as a Row, Column or Scalar operand",
)
_NORMALISATION = Communication(
    "normalisation",
    "each element is scaled by statistics over many elements, which are complete only after all tiles are",
    "return the unnormalised values and call {op} on the GEMM's result",
)
_SCAN = Communication(
    "scan",
    "each element depends on all the elements before it",
    "call {op} on the GEMM's result",
)
_ORDERING = Communication(
    "ordering",
    "where an element goes depends on all the others",
    "call {op} on the GEMM's result",
)
_CONTRACTION = Communication(
    "contraction",
    "it sums products over many elements, which is another GEMM, convolution or attention",
    "run it as an operation of its own, with an epilogue of its own: epilogue after the first GEMM, then {op}",
)
_INDEXING = Communication(
    "indexing",
    "it reads or writes elements at other positions than the one being computed",
    "index before or after the GEMM; an operand indexed beforehand can be given as Row, Column or Aux",
)
_SHIFT = Communication(
    "shift",
    "it moves elements to other positions",
    "call {op} on the GEMM's result, or on the operand before giving it",
)
_SHAPE = Communication(
    "change of shape",
    "it moves elements to other positions or changes the shape, which the GEMM fixes",
    "call {op} on the GEMM's result, or on the operand before giving it; operands are spread over the "
    "accumulator by their kind (Row, Column, Scalar, Aux), without unsqueeze or expand",
)
LOSS = Communication(
    "loss",
    "it compares many elements, or reduces over them",
    "return the predictions from the epilogue and call {op} on the GEMM's result",
)

_COMMUNICATING: dict[Communication, str] = {
    _REDUCTION: "sum nansum mean nanmean amax amin aminmax max min argmax argmin prod std var std_mean "
    "var_mean norm vector_norm matrix_norm frobenius_norm nuclear_norm dist cdist pdist logsumexp all any "
    "median nanmedian mode quantile nanquantile count_nonzero histc histogram bincount trace "
    "cosine_similarity pairwise_distance equal allclose corrcoef cov nonzero nonzero_static argwhere histogramdd "
    "sum_to_size segment_reduce norm_except_dim hash_tensor is_same_size",
    _NORMALISATION: "softmax log_softmax softmin gumbel_softmax layer_norm native_layer_norm rms_norm "
    "group_norm batch_norm instance_norm local_response_norm normalize renorm",
    _SCAN: "cumsum cumprod cummax cummin logcumsumexp diff gradient cumulative_trapezoid trapezoid trapz vander",
    _ORDERING: "sort argsort msort topk kthvalue unique unique_consecutive searchsorted bucketize",
    _CONTRACTION: "matmul mm bmm addmm addbmm baddbmm linear bilinear einsum dot vdot inner outer ger "
    "tensordot mv addmv addr kron multi_dot chain_matmul scaled_dot_product_attention "
    "multi_head_attention_forward attention flex_attention grouped_mm scaled_mm scaled_grouped_mm "
    "linear_cross_entropy cross gru lstm rnn_tanh rnn_relu gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell "
    "det logdet slogdet inverse pinverse cholesky cholesky_inverse cholesky_solve matrix_exp matrix_power "
    "qr svd eig lu lu_solve solve lstsq triangular_solve geqrf orgqr ormqr pca_lowrank svd_lowrank lobpcg",
    _INDEXING: "getitem delitem gather scatter scatter_add scatter_reduce index_select index_add "
    "index_copy index_fill index_put take take_along_dim embedding embedding_bag masked_select "
    "masked_scatter select narrow select_scatter slice_scatter one_hot grid_sample grid_sampler "
    "grid_sampler_2d grid_sampler_3d put index_reduce diagonal_scatter as_strided_scatter",
    _SHIFT: "roll flip fliplr flipud rot90 channel_shuffle",
    _SHAPE: "reshape view view_as reshape_as permute transpose t T mT H mH adjoint movedim moveaxis "
    "swapaxes swapdims flatten unflatten ravel unsqueeze squeeze expand expand_as broadcast_to "
    "broadcast_tensors repeat repeat_interleave tile cat concat concatenate stack hstack vstack dstack "
    "column_stack chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unfold fold "
    "pixel_shuffle pixel_unshuffle pad interpolate upsample tril triu diag diagonal diag_embed as_strided "
    "meshgrid glu block_diag resize resize_as atleast_1d atleast_2d atleast_3d cartesian_prod combinations row_stack "
    "constant_pad_nd diagflat upsample_bilinear upsample_nearest",
    LOSS: "cross_entropy nll_loss ctc_loss triplet_margin_loss",
}
COMMUNICATING_BY_NAME = {name: kind for kind, names in _COMMUNICATING.items() for name in names.split()}
COMMUNICATING_BY_PATTERN: tuple[tuple[re.Pattern[str], Communication], ...] = (
    (re.compile(r"conv(_|\d|$|olution|_transpose)|linalg_|fft_|stft$|istft$"), _CONTRACTION),
    (re.compile(r"(adaptive_|fractional_|lp_|max_|avg_)\w*(pool|unpool)\d?d?"), _REDUCTION),
    (re.compile(r"\w+_loss$"), LOSS),
)
#: torch.nn.modules file -> what its modules compute, for those that ask for the shape before they call it.
MODULES = {
    "batchnorm": "batch_norm",
    "instancenorm": "instance_norm",
    "pooling": "max_pool2d",
    "rnn": "linear",
}
_SPLIT_THE_WEIGHT = (
    "split the weight instead: one GEMM gives the gate, and the other's epilogue multiplies by it as "
    "an Aux operand, as in epilogues.builders.gate"
)
#: Ways out that are better than the general one.
COMMUNICATION_HINTS = {
    "softmax": "return the logits and call torch.softmax on the GEMM's result",
    "glu": _SPLIT_THE_WEIGHT,
    "chunk": f"for a gate, {_SPLIT_THE_WEIGHT}; otherwise call {{op}} on the GEMM's result",
    "split": f"for a gate, {_SPLIT_THE_WEIGHT}; otherwise call {{op}} on the GEMM's result",
    "max": "for the larger of two values write ep.maximum(x, y); the maximum over a dimension is taken of "
    "the GEMM's result",
    "min": "for the smaller of two values write ep.minimum(x, y); the minimum over a dimension is taken of "
    "the GEMM's result",
    "getitem": "index the GEMM's result, or the operand before giving it; an operand is spread over the "
    "accumulator by its kind (Row, Column, Scalar, Aux), without [None] or [:, None]",
    "sum": "return the elements from the epilogue and call torch.sum on the GEMM's result; to divide by a "
    "row sum that is known before the GEMM, give it as a Column operand",
}

_CONTROL = "a value is symbolic while the epilogue is traced: it stands for every element at once"
_NO_TENSOR = "an epilogue is traced once, for any M and N: while it is, there is no tensor"
_RANDOM = "an epilogue is a function of the accumulator and its operands; random numbers are neither"
_BITS = "there are only floating point values and conditions in an epilogue, and on values it has no meaning"
_USE_CONDITIONS = "combine conditions, such as (x > 0) & (x < 1); to scale by a power of two, multiply"
_NO_BRANCH = (
    "write the choice elementwise: torch.where(condition, a, b), torch.maximum(x, y), &, | and ~ for and, or and "
    "not, (x > 0) & (x < 1) for 0 < x < 1; or decide outside of the epilogue"
)
_POLYNOMIALS = " ".join(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw") + (
    " hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
)
_NO_SHAPE = "leave shapes to the operand kinds: Row, Column, Scalar, Aux"

#: What to do in place of a cast to few bits.
QUANTISED = (
    "epilogues.builders.quantize gives the quantised values in a floating dtype; convert the GEMM's result to the "
    "narrow dtype, which is exact"
)

#: names -> (why not, what instead), for what is elementwise or no operation on elements at all.
_EXPLAINED: dict[str, tuple[str, str]] = {
    # elementwise, and no row of the operation table
    "lgamma gammaln mvlgamma multigammaln digamma psi polygamma zeta gammainc gammaincc igamma igammac erfinv erfcx "
    "ndtri log_ndtr i0 i0e i1 i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 spherical_bessel_j0 airy_ai "
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
    f"scaled_modified_bessel_k1 nextafter {_POLYNOMIALS}": (
        "there is no device function for it in the operation table",
        "call torch's function on the GEMM's result; of an operand, call it before the GEMM and give the values",
    ),
    "gcd lcm": (
        "it is a function of integers, and no value has an integer dtype",
        "compute it before the GEMM and give the result as an operand",
    ),
    "frexp": ("it gives a mantissa and an integer", "write the powers: torch.floor(torch.log2(x.abs()))"),
    "isin": ("it compares with each element of a tensor", "compare with each number: (x == 1) | (x == 2)"),
    "complex polar imag cfloat chalf cdouble view_as_real view_as_complex view_as_complex_copy view_as_real_copy": (
        "values are real, and no value has a complex dtype",
        "keep the real and the imaginary part as values of their own",
    ),
    "real": ("values are real already", "leave it out"),
    "isreal": ("values are real: it would always be true", "leave it out"),
    "quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic dequantize int_repr": (
        "no value has a quantized dtype",
        "epilogues.builders.quantize gives the quantized values in a floating dtype, builders.dequantize the real "
        "ones; for a scale of your own, write torch.clamp(torch.round(x / scale + zero_point), -128, 127)",
    ),
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant": (
        "its gradient passes rounding by, and an epilogue is differentiated as what it computes",
        "where no gradient is needed, write "
        "(torch.clamp(torch.round(x / scale) + zero_point, -128, 127) - zero_point) * scale",
    ),
    "backward grad_fn is_leaf retain_grad retains_grad register_hook register_post_accumulate_grad_hook output_nr": (
        _NO_TENSOR,
        "gradients are taken of the GEMM's result, outside",
    ),
    "isclose": ("its tolerances make it more than one comparison", "write (x - y).abs() <= atol"),
    "bool is_nonzero": (f"{_CONTROL}, so there is no one truth value to branch on", _NO_BRANCH),
    "int float index item tolist numpy array": (
        f"{_CONTROL}, so it is no Python number (math.* functions ask for one), and no value has an integer dtype",
        "use ep.* or torch.* functions in place of math.* or numpy functions; to round, torch.trunc(x)",
    ),
    "format": (f"{_CONTROL}, so it is no number to format", "print it without a format: {value}"),
    "call": (f"{_CONTROL}, and no function", "to multiply, write x * (...)"),
    "setattr delattr": (f"{_CONTROL}, and has no attributes to change", "keep what you compute in variables"),
    "len iter next contains": (f"{_CONTROL}, so it cannot be iterated or unpacked", _NO_SHAPE),
    "shape size ndim ndimension dim numel nelement stride dim_order is_contiguous storage storage_offset "
    "untyped_storage element_size itemsize nbytes": (
        f"{_NO_TENSOR}, and no shape to ask for",
        _NO_SHAPE,
    ),
    "device is_cuda is_cpu is_mps is_xpu is_sparse is_quantized layout requires_grad grad data cpu cuda xpu "
    "data_ptr requires_grad_ get_device is_meta pin_memory is_pinned": (
        _NO_TENSOR,
        "place operands on the GEMM's device before the call",
    ),
    "detach": (
        "an epilogue is differentiated as what it computes, so that nothing can be held back from the gradient",
        "leave it out if the gradient may go through, else compute that part outside and pass it as an operand",
    ),
    "clone contiguous": ("values have no storage of their own", "leave it out"),
    "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rand rand_like randn "
    "randn_like randint randint_like bernoulli normal uniform multinomial poisson rrelu exponential "
    "native_dropout": (
        _RANDOM,
        "draw the numbers beforehand and give them as an Aux operand (for dropout, the mask times 1/(1 - p)); "
        "in evaluation dropout is the identity: module.eval(), training=False",
    ),
    "int8 byte char short": ("values are cast to float32, float16 or bfloat16 only", QUANTISED),
    "double long half_to_float bfloat": (
        "values are computed in float32 and cast to float32, float16 or bfloat16 only",
        "leave the cast out, or write x.to(torch.float32)",
    ),
    "and or xor invert lshift rshift bitwise_left_shift bitwise_right_shift": (_BITS, _USE_CONDITIONS),
    "prelu": (
        "its slope is a tensor that is no operand",
        "make it one: add a parameter slope: Row (Scalar if it is a single number), and write torch.prelu(x, slope)",
    ),
    "divmod": ("it gives two values", "write x // y and x % y"),
    "floor ceil trunc": (f"{_CONTROL}, so it is no Python integer", "write torch.{op}(x)"),
    "type_as": (
        "a dtype is named, as there are no tensors to have one while the epilogue is traced",
        "name it: x.to(torch.bfloat16)",
    ),
    "full_like new_full new_tensor": (
        _NO_TENSOR,
        "write the number itself, x + 0.5 for x + torch.full_like(x, 0.5): it is spread over all elements",
    ),
    "empty_like new_empty": (_NO_TENSOR, "leave it out: there is no memory to fill; write the values themselves"),
    "new_zeros new_ones": (_NO_TENSOR, "write 0.0 or 1.0: a number is spread over all elements"),
}
EXPLAINED_BY_NAME = {name: reason for names, reason in _EXPLAINED.items() for name in names.split()}
