// Linear attention in its own order of products. Where every row sees all N tokens of its sample,
//
//   A X = scale / N Z W X^T X = scale Z W R^T R,     R^T R = X^T X / N,
//
// so the d rows of R are keys that give the same outputs and the same gradients by W, its factors,
// U, V, a prompt and the query rows, without a division by tokens. R is computed once (see
// kernels/triangle.hpp), for all heads and query rows, and in training for all steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../problem/data.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {

/// What R is computed for.
enum class TriangleUse {
  kTokens,    // a gradient by the tokens, for which they must be there
  kOutputs,   // outputs or loss, once
  kGradient,  // a loss and gradient, `times` of them
  kTraining   // more than that of a gradient: what it costs does not matter
};

/// Whether the rows of R are cheaper keys than T tokens. The same for every n, number of threads
/// and number of steps. False where weights are not linear or rows see different tokens.
bool prefers_triangle(const Shape& shape, RowMap row_map, TriangleUse use, double times = 1);
template <class real>
bool prefers_triangle(const Data<real>& data, TriangleUse use, double times = 1) {
  return prefers_triangle(data.shape, data.row_map, use, times);
}

/// Whether steps on all samples of `runs` runs are cheaper from products of the tokens than from
/// tokens or R.
bool prefers_products(const Shape& shape, RowMap row_map, const Registers& registers,
                      std::ptrdiff_t runs);

/// For tests and measurements: later calls and trainings take the keys "tokens", or "triangle"
/// where R can stand for these, or what is cheaper ("auto"). Throws std::invalid_argument for
/// another name.
void force_keys(const std::string& name);

/// Data with R in the place of the tokens, which are query rows still.
template <class real>
class TriangularData {
 public:
  /// Of `runs` runs. `data` must stay, and have its numbers when R is computed.
  TriangularData(const Data<real>& data, std::ptrdiff_t runs);
  TriangularData(const TriangularData&) = delete;
  TriangularData& operator=(const TriangularData&) = delete;

  const Data<real>& operator*() const { return data_; }

  /// Computes R and the limits of samples `first` to `last` of all runs, with a workspace of
  /// `workspace_size` numbers.
  void compute(std::ptrdiff_t first, std::ptrdiff_t last, real* workspace);
  std::ptrdiff_t workspace_size() const;

  /// Computes those of all samples.
  void compute_all(int threads);

 private:
  void write_triangles(std::ptrdiff_t run, std::ptrdiff_t first, int count, real* workspace);
  void write_limits(std::ptrdiff_t run, std::ptrdiff_t first, std::ptrdiff_t last);
  std::ptrdiff_t length(std::ptrdiff_t run, std::ptrdiff_t sample) const {
    return given_.lengths ? given_.lengths[run * given_.run.lengths + sample] : given_.shape.T;
  }
  int runs_with_triangles() const { return data_.run.x ? int(runs_) : 1; }

  const Data<real> given_;
  const std::ptrdiff_t runs_;
  Data<real> data_;
  std::vector<real> triangles_;  // (runs or 1, n, d, d)
  std::vector<double> limits_;   // (runs or 1, n, q)
};

/// Data of a single call, with R where that is cheaper and of bounded size: see kTriangleBytes.
template <class real>
class CheaperKeys {
 public:
  CheaperKeys(const Data<real>& data, TriangleUse use, int threads) : data_(&data) {
    const Shape& s = data.shape;
    const double bytes = double(s.n) * s.d * s.d * sizeof(real);
    if (bytes > kTriangleBytes && s.T < kManyTokens * s.d) return;
    if (!prefers_triangle(data, use)) return;
    triangular_ = std::make_unique<TriangularData<real>>(data, 1);
    triangular_->compute_all(threads);
    data_ = &**triangular_;
  }
  CheaperKeys(const CheaperKeys&) = delete;
  CheaperKeys& operator=(const CheaperKeys&) = delete;

  const Data<real>& operator*() const { return *data_; }

 private:
  const Data<real>* data_;
  std::unique_ptr<TriangularData<real>> triangular_;
};

}  // namespace mhfast
