// Hessian-vector products of layers: their losses and their readout.
#pragma once

#include <vector>

#include "hessian_product.hpp"

namespace mhfast {

/// A row of outputs, `stride` numbers apart, with its targets; its derivatives, which are zeros
/// before, are written to both g and g_row.
template <class real>
struct OutputRow {
  const real *f, *df, *y;
  std::ptrdiff_t stride;
  real *g, *dg, *g_row, *dg_row;
};

/// Works on a tile of rows: their losses are known from all heads of these rows.
template <class real>
class LayerHessian final : public HessianProduct<real> {
 public:
  explicit LayerHessian(const HessianCall<real>& call)
      : HessianProduct<real>(call, call.data.shape.p, true) {
    if (!values_first_) this->load_readout(s_.d, s_.p, s_.d);
  }

 private:
  using Base = HessianProduct<real>;
  using Base::attended_size_, Base::by_V_, Base::data_, Base::kernels_, Base::loss_, Base::model_,
      Base::moves_, Base::of_keys_, Base::out_, Base::queries_row_, Base::readout_,
      Base::readout_size_, Base::s_, Base::tangent_, Base::tile_rows_, Base::total_,
      Base::values_first_, Base::values_row_, Base::wants_readout_, Base::wants_W_;
  using typename Base::Block, typename Base::Sums, typename Base::Tile, typename Base::Workspace;

  void run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                  bool fresh) const override;
  void run_values(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh) const;
  void load_values(const Workspace& workspace) const;
  WithTangent<real> find_weights(const Tile& tile, Workspace& workspace) const;
  void find_outputs(const Tile& tile, const WithTangent<real>& weights,
                    const Workspace& workspace) const;
  void derive_values(const Tile& tile, Workspace& workspace) const;
  void add_by_values(const Tile& tile, const WithTangent<real>& weights,
                     const Workspace& workspace) const;
  void add_values_terms(const Workspace& workspace, const Sums& sums, bool fresh) const;
  void run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                 bool fresh) const override;
  void find_outputs(const Block& block) const;
  void find_derivatives(std::ptrdiff_t first, int count, const Block& block) const;
  WithTangent<real> find_upstream(const Block& block) const;
  void add_readout_terms(int count, const Block& block, const Sums& sums, bool fresh) const;
  void differentiate_row(std::ptrdiff_t i, int t, const OutputRow<real>& row) const;
  void add_outputs(int h, const Tile& tile, Workspace& workspace) const;
  void find_derivatives(std::ptrdiff_t i, const Tile& tile, Workspace& workspace) const;
  WithTangent<real> find_upstream(int h, const Tile& tile, Workspace& workspace) const;
  void add_readout_terms(int h, const Tile& tile, Workspace& workspace, const Sums& sums,
                         bool fresh) const;
  void store_readout(int h) const override;
};

}  // namespace mhfast
