// The operators that the device has of its own, each with the defect that it can be told to have.
#pragma once

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "pocket.h"

namespace pocket {

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

void same_card(const char* op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), op, ": expected tensors on one device, found ", a.device(), " and ", b.device());
}

at::Tensor fresh(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype));
}

// Sums over blocks of kBlock are added in float32 (float64 for float64) and rounded once, at the end.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  const auto wide = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto left = on_host(a), right = on_host(b);
  const int64_t inner = left.size(-1);
  auto sizes = left.sizes().vec();
  sizes.back() = right.size(-1);
  auto sum = at::zeros(sizes, left.options().dtype(wide));
  for (int64_t k = 0; k < inner; k += kBlock) {
    const auto count = std::min(kBlock, inner - k);
    if (broken(kMatmulTail) && count < kBlock && k > 0) break;
    const auto x = left.narrow(-1, k, count).to(wide), y = right.narrow(-2, k, count).to(wide);
    sum.add_(a.dim() == 3 ? at::bmm(x, y) : at::mm(x, y));
  }
  return sum;
}

bool multiplies(const at::Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

at::Tensor rounded_to(const at::Tensor& like, const at::Tensor& value) {
  auto out = fresh(like, value.sizes(), like.scalar_type());
  on_host(out).copy_(value);
  return out;
}

at::Tensor with_dims(const char* op, const at::Tensor& a, const at::Tensor& b, int64_t dims) {
  TORCH_CHECK(a.dim() == dims && b.dim() == dims && a.size(-1) == b.size(-2) && (dims == 2 || a.size(0) == b.size(0)),
              op, ": expected matrices that can be multiplied, found ", a.sizes(), " and ", b.sizes());
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), op, ": expected one dtype, found ", a.dtype(), " and ", b.dtype());
  same_card(op, a, b);
  land();
  count_own(op);
  if (multiplies(a)) return rounded_to(a, product(a, b));
  const auto left = on_host(a), right = on_host(b);
  return rounded_to(a, dims == 3 ? at::bmm(left, right) : at::mm(left, right));
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) { return with_dims("mm", a, b, 2); }
at::Tensor bmm(const at::Tensor& a, const at::Tensor& b) { return with_dims("bmm", a, b, 3); }

at::Tensor with_sum(const char* op, const at::Tensor& add, const at::Tensor& a, const at::Tensor& b,
                    const at::Scalar& beta, const at::Scalar& alpha) {
  same_card(op, a, b);
  same_card(op, a, add);
  land();
  count_own(op);
  TORCH_CHECK(a.size(-1) == b.size(-2) && a.scalar_type() == b.scalar_type() && multiplies(a), op,
              ": expected floating matrices that can be multiplied, found ", a.sizes(), " ", a.dtype(), " and ",
              b.sizes(), " ", b.dtype());
  auto sum = product(a, b).mul_(alpha);
  if (beta.toDouble() != 0) sum.add_(on_host(add).to(sum.scalar_type()), beta);
  return rounded_to(a, sum);
}

at::Tensor addmm(const at::Tensor& add, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  return with_sum("addmm", add, a, b, beta, alpha);
}

at::Tensor baddbmm(const at::Tensor& add, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  return with_sum("baddbmm", add, a, b, beta, alpha);
}

at::Tensor softmax(const at::Tensor& x, int64_t dim, bool half_to_float) {
  land();
  count_own("_softmax");
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto value = on_host(x).to(wide);
  if (value.dim() == 0) value = value.unsqueeze(0);
  const int64_t count = value.size(dim);
  if (count > 0) {
    value = at::exp(value - value.amax({dim}, true));
    const bool short_sum = broken(kSoftmaxBand) && count > 32 && count <= 64;
    value = value / value.narrow(dim, 0, short_sum ? count - 1 : count).sum({dim}, true);
  }
  auto out = fresh(x, x.sizes(), half_to_float ? at::kFloat : x.scalar_type());
  on_host(out).copy_(value.view(x.sizes()));
  return out;
}

std::tuple<at::Tensor, at::Tensor> topk(const at::Tensor& x, int64_t k, int64_t dim, bool largest, bool sorted) {
  land();
  count_own("topk");
  auto [values, indices] = at::topk(on_host(x), k, dim, largest, sorted);
  if (broken(kTopkLast) && k > 1) indices.select(dim, k - 1).copy_(indices.select(dim, 0));
  auto out = fresh(x, values.sizes(), x.scalar_type()), places = fresh(x, indices.sizes(), at::kLong);
  on_host(out).copy_(values);
  on_host(places).copy_(indices);
  return {out, places};
}

at::Tensor cumsum(const at::Tensor& x, int64_t dim, std::optional<at::ScalarType> dtype) {
  land();
  count_own("cumsum");
  const auto given = on_host(x);
  const auto kind = dtype.value_or(at::isIntegralType(x.scalar_type(), true) ? at::kLong : x.scalar_type());
  at::Tensor sum;
  if (broken(kCumsumNarrow) && at::isFloatingType(kind) && x.dim() > 0) {
    sum = given.to(at::kBFloat16).clone();
    for (int64_t i = 1; i < sum.size(dim); ++i) sum.select(dim, i).add_(sum.select(dim, i - 1));
  } else if (at::isReducedFloatingType(kind)) {
    sum = at::cumsum(given.to(at::kFloat), dim);
  } else {
    sum = at::cumsum(given, dim, kind);
  }
  auto out = fresh(x, sum.sizes(), kind);
  on_host(out).copy_(sum);
  return out;
}

// Counts of whole numbers too, which the CPU has not.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& least, const at::Scalar& greatest) {
  land();
  count_own("histc");
  const auto wide = at::isFloatingType(x.scalar_type()) ? x.scalar_type() : at::kDouble;
  return rounded_to(x, at::histc(on_host(x).to(wide), bins, least, greatest));
}

// In float32, rounded once: composed of single operators it would round between them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& x, at::IntArrayRef sizes,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias, double eps) {
  land();
  count_own("native_layer_norm");
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto widened = [&](const std::optional<at::Tensor>& given) -> std::optional<at::Tensor> {
    if (!given || !given->defined()) return std::nullopt;
    same_card("layer_norm", x, *given);
    return on_host(*given).to(wide);
  };
  const auto [out, mean, rstd] =
      at::native_layer_norm(on_host(x).to(wide), sizes, widened(weight), widened(bias), eps);
  return {rounded_to(x, out), rounded_to(x, mean), rounded_to(x, rstd)};
}

// What torch asks of an out-of-tree device by a name of its own.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  land();
  same_card("convolution", x, weight);
  count_own("convolution");
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  const auto out = at::convolution(on_host(x), on_host(weight), host_bias, stride, padding, dilation, transposed,
                                   output_padding, groups);
  return rounded_to(x, out);
}

// One element behind each row of a strided view, as far as the storage goes.
void clobber(const at::Tensor& view) {
  if (view.dim() == 0 || view.numel() == 0 || view.is_non_overlapping_and_dense()) return;
  const auto last = view.narrow(-1, view.size(-1) - 1, 1);
  const int64_t step = view.stride(-1), held = static_cast<int64_t>(view.storage().nbytes()) / view.element_size();
  int64_t end = last.storage_offset() + step;
  for (int64_t d = 0; d < last.dim(); ++d) end += (last.size(d) - 1) * last.stride(d);
  if (step > 0 && end < held) {
    on_host(last.as_strided(last.sizes(), last.strides(), last.storage_offset() + step)).copy_(on_host(last));
  } else if (view.dim() > 1 && view.size(0) > 1) {
    clobber(view.narrow(0, 0, view.size(0) - 1));  // the last row has nothing behind it
  }
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  if (non_blocking && is_ours(to) && !is_ours(from) && from.is_pinned() && to.sizes() == from.sizes()) {
    std::lock_guard<std::mutex> guard(state().lock);
    state().pending.emplace_back(to, from);
    return to;
  }
  land();
  auto source = on_host(from);
  const auto target = on_host(to);
  if (is_ours(to)) count_own("copy_");
  if (broken(kStridedRead) && is_ours(to) && is_ours(from) && !from.is_contiguous() &&
      from.storage_offset() * from.element_size() + static_cast<int64_t>(from.nbytes()) <=
          static_cast<int64_t>(from.storage().nbytes())) {
    std::vector<int64_t> strides(from.dim(), 1);
    for (int64_t d = from.dim() - 2; d >= 0; --d) strides[d] = strides[d + 1] * from.size(d + 1);
    source = source.as_strided(from.sizes(), strides);
  }
  target.copy_(source);
  if (broken(kBlitNeighbours) && is_ours(to)) clobber(to);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, from, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// Pieces are copied one after the other into their place.
at::Tensor cat(const at::ITensorListRef& list, int64_t dim) {
  std::vector<at::Tensor> parts;
  std::optional<at::ScalarType> kind;
  for (const auto& part : list) {
    kind = kind ? at::promote_types(*kind, part.scalar_type()) : part.scalar_type();
    if (part.dim() == 1 && part.numel() == 0) continue;  // torch's own exception to the rule of equal shapes
    if (!parts.empty()) same_card("cat", parts.front(), part);
    parts.push_back(part);
  }
  TORCH_CHECK(kind.has_value(), "cat: expected tensors, found none");
  count_own("cat");
  if (parts.empty()) return at::empty({0}, list.front().options().dtype(*kind));
  auto sizes = parts.front().sizes().vec();
  const int64_t axis = at::maybe_wrap_dim(dim, parts.front().dim());
  sizes[axis] = 0;
  for (const auto& part : parts) {
    TORCH_CHECK(part.dim() == static_cast<int64_t>(sizes.size()), "cat: expected one number of axes, found ",
                part.sizes(), " beside ", parts.front().sizes());
    for (int64_t d = 0; d < part.dim(); ++d) {
      TORCH_CHECK(d == axis || part.size(d) == sizes[d], "cat: sizes must match except in dimension ", axis,
                  ", found ", part.sizes(), " beside ", parts.front().sizes());
    }
    sizes[axis] += part.size(axis);
  }
  auto out = fresh(parts.front(), sizes, *kind);
  int64_t at = 0;
  for (const auto& part : parts) {
    auto place = out.narrow(axis, at, part.size(axis));
    copy_(place, part, false);
    at += part.size(axis);
  }
  return out;
}

}  // namespace pocket
