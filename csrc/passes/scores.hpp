// Arguments of the kernels that compute scores, filled in one place for all who call them.
#pragma once

#include "../kernels/table.hpp"

namespace mhfast {

/// What is scored at a time: so many keys and query rows of each of `units` units.
struct ScoreSize {
  int keys, rows, units;
};

/// One head of a model and the tokens of a slab, in the layouts of ScoreArguments. Without `ut`
/// only weights can be requested. `scale` matters where w is null.
template <class real>
struct ScoreOperands {
  const real *w, *x, *z;
  const real* limits;  // or null: every row sees all keys
  const real* ut = nullptr;
  std::ptrdiff_t ut_k = 0;
  bool ut_laned = false;
  RowMap map{};
  real scale = 1;
  WordsOfUnits words{};
  int rank = 0;  // or w is Q and
  const real* kt = nullptr;
  const real* exps = nullptr;
};

/// Where a thread's scores go. `s` and `c` are those of the head that is scored.
template <class real>
struct ScoreMemory {
  real *p, *s, *c, *readout, *row_readouts, *row_gaps;
};

/// `unit_stride` numbers lie from unit to unit in `s` and `c`.
template <class real>
ScoreArguments<real> score_arguments(RowMode mode, int features, const ScoreSize& size,
                                     const ScoreOperands<real>& of, const ScoreMemory<real>& to,
                                     std::ptrdiff_t unit_stride) {
  ScoreArguments<real> in{};
  in.T = size.keys;
  in.q = size.rows;
  in.d = features;
  in.units = size.units;
  in.w = of.w;
  in.rank = of.rank;
  in.kt = of.kt;
  in.scale = of.scale;
  in.ut = of.ut;
  in.ut_k = of.ut_k;
  in.ut_laned = of.ut_laned;
  in.map = of.map;
  in.words = of.words;
  in.exps = of.exps;
  in.x = of.x;
  in.z = of.z;
  in.limits = of.limits;
  in.p = to.p;
  in.s = to.s;
  in.c = to.c;
  in.unit_stride = unit_stride;
  in.readout = to.readout;
  in.row_readouts = to.row_readouts;
  in.row_gaps = to.row_gaps;
  in.mode = mode;
  return in;
}

}  // namespace mhfast
