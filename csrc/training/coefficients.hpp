// Training of a classifier's readout in coefficients of the samples, where these are fewer than its
// features. With phi_i the row of attended tokens of sample i (problem/attended.hpp), gradients are
// sums of these, so that for steps that are linear in gradients
//
//   U_k = U_0 + H^(-1/2) sum over i of c_i phi_i       f = f_0 + G c       G = phi phi^T
//
// where all heads attend alike, and G is that over H where they do not. The step of c is that of U
// with dL/df in the place of dL/dU: n^2 multiply-adds, not 2 n features. Numbers are double.
// Outputs come from rows (G_i1, ..., G_in, f_0i), whose last coefficient is 1 and stays.
//
// Sizes of U_k are sums over n, too, as
//
//   |U_k|^2 = |U_0|^2 + 2 <c, f_0> + <c, G c>
//
// unless little is left of their terms; then they are those of U_k itself.
#pragma once

#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/attended.hpp"
#include "../runtime/scratch.hpp"
#include "train.hpp"

namespace mhfast {

template <class real>
class Coefficients {
 public:
  /// Whether a training whose attended tokens are kept is one in coefficients. Not by its number of
  /// steps: a training in several parts is bitwise one.
  static bool serve(const TrainingTask<real>& task);

  /// `task` must stay, with its attended tokens.
  explicit Coefficients(const TrainingTask<real>& task);
  Coefficients(const Coefficients&) = delete;
  Coefficients& operator=(const Coefficients&) = delete;

  /// Rows, labels and weights of a run, as those of one head and one token.
  Data<double> data(std::ptrdiff_t run) const;
  std::ptrdiff_t row() const { return row_; }  // numbers of a row, whole vectors
  double* theta(std::ptrdiff_t run) const { return theta_ + run * row_; }
  /// What the optimizer keeps, or null.
  double* velocity(std::ptrdiff_t run) const {
    return velocity_ ? velocity_ + run * row_ : nullptr;
  }

  /// Brings the readout, the optimizer's state and the caller's coefficients of a run up to date.
  void write_back(std::ptrdiff_t run) const;
  /// Writes a row of a record of parameters or of attention.
  void record(const Record& record, std::ptrdiff_t run, std::int64_t row, std::int64_t step) const;

 private:
  /// What does not depend on the step.
  struct Known {
    double square = 0;          // |U_0|^2
    double most = 0;            // the largest root of G_ii
    std::vector<double> along;  // of each direction D: its outputs (n), then <U_0, D>, |D|^2
  };
  /// A sum, and the size of its terms.
  struct Sum {
    double value, terms;
  };

  void take_memory();
  void take_data();
  void multiply_rows(const double* phi, double* rows) const;
  void compute(std::ptrdiff_t run);
  void find_outputs(std::ptrdiff_t run, const real* readout, double* to) const;
  void find_directions(std::ptrdiff_t run);
  void make(std::ptrdiff_t run, const double* coefficients, const real* from, real* to) const;
  bool record_sum(const Record& record, std::ptrdiff_t run, double* to) const;
  Sum square(std::ptrdiff_t run, bool of_change) const;

  const double* phi(std::ptrdiff_t run) const { return phi_ + run * phi_run_; }
  double* rows(std::ptrdiff_t run) const { return rows_ + run * rows_run_; }

  const TrainingTask<real>& task_;
  const Kernels<double>& kernels_;
  const AttendedRows of_tokens_;
  const std::ptrdiff_t n_, size_, row_;  // size_: of a row of phi_, row_: of rows_
  const std::ptrdiff_t rows_run_;        // with rows up to whole vectors of them
  const std::ptrdiff_t phi_run_;
  const double divisor_;
  AlignedBuffer block_;
  const double* phi_;
  double *own_phi_, *rows_, *theta_, *velocity_, *y_, *weight_, *sums_;
  real* changes_;
  std::vector<Known> known_;
};

}  // namespace mhfast
