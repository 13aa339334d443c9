// Hessian-vector products of classifiers: their loss and their readout.
#pragma once

#include <vector>

#include "hessian_product.hpp"

namespace mhfast {

/// The derivative of a sample's loss by the sum of its readouts, and its change along the
/// direction.
struct LossChange {
  double derivative, tangent;
};

/// Works on all rows of a sample before its loss is known. If there are many, only the weights of
/// one head are kept, and they are computed twice.
template <class real>
class ClassifierHessian final : public HessianProduct<real> {
 public:
  explicit ClassifierHessian(const HessianCall<real>& call)
      : HessianProduct<real>(call, call.data.shape.q, false) {
    if (readout_only_) {
      load_pairs();
      return;
    }
    this->load_readout(s_.q, s_.d, this->padded(s_.q));
    if (!this->blocks_) return;
    const auto by_rows = [&](const real* from, std::vector<real>& to) -> const real* {
      if (!from) return nullptr;
      const std::ptrdiff_t rows = this->block_rows();
      to.resize(rows * s_.d);
      for (int h = 0; h < s_.H; ++h)
        for (int t = 0; t < s_.q; ++t)
          for (int k = 0; k < s_.d; ++k) to[k * rows + t * s_.H + h] = *from++;
      return to.data();
    };
    of_rows_ = {by_rows(model_.at[kU], value_of_rows_), by_rows(tangent_[kU], tangent_of_rows_)};
  }

 private:
  using Base = HessianProduct<real>;
  using Base::data_, Base::heads_kept_, Base::kernels_, Base::loss_, Base::model_, Base::out_,
      Base::readout_, Base::readout_only_, Base::readout_size_, Base::s_, Base::tangent_,
      Base::tile_rows_, Base::total_, Base::wants_readout_;
  using typename Base::Block, typename Base::Sums, typename Base::Tile, typename Base::Workspace;

  void run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                  bool fresh) const override;
  void run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                 bool fresh) const override;
  void load_pairs();
  void run_readout(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh) const;
  void run_readout(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                   bool fresh) const;
  void differentiate(std::ptrdiff_t first, int count, const double* phi, const double* phi_tangent,
                     Block& block) const;
  LossChange differentiate(std::ptrdiff_t i, double phi, double phi_tangent) const;
  void add_readout_terms(int h, const Tile& tile, double derivative, double tangent,
                         Workspace& workspace, const Sums& sums, bool fresh) const;
  void store_readout(int h) const override {
    this->sum_chunks(&Sums::of_readout, h * readout_size_, s_.q,
                     out_[kU] + std::ptrdiff_t(h) * s_.q * s_.d);
  }

  std::vector<real> value_of_rows_, tangent_of_rows_;
  WithTangent<real> of_rows_;  // U (d, rows (t, h)), of blocks
  std::vector<real> pairs_;    // U and its tangent, where A X is all that is needed
};

}  // namespace mhfast
