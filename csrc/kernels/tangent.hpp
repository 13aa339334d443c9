// Softmax, its derivative and the tangents of both along a direction, one query row per lane.
//
//   weights      A = softmax(S),  a = dS - sum(A dS)                 so that dA = A a
//   derivative   b = C - sum(A C),  D = A b,  E = a b + dC,  dD = A (E - sum(A E))
//                readout <A, C>, its tangent sum(A E)
//
// All three differences are centred first at the row's largest weight, as in softmax.hpp, so that
// they keep full relative accuracy in saturation.
//
// Other row maps, where S and dS are kept:
//
//   softmax1   the same with a further logit 0 whose dS and C are 0
//   entries    dA = f' dS / N,  D = f' C / N,  dD = (f'' dS C + f' dC) / N
#pragma once

#include "product.hpp"
#include "row_maps.hpp"
#include "softmax.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
void product(const Product<real>& p) {
  multiply<Left::kShared>(p);
}

template <class real>
void product_lanes(const Product<real>& p) {
  multiply<Left::kLaned>(p);
}

/// sum over keys of a[s] (x[s] - x[m]), and x[m]; m is the key of the row's peak. Where a is 0 its
/// factor counts as 0, whatever it is.
template <class real, class Columns, class Entry>
inline Vec<real> centred_sum(const Columns& columns, const Peak<real>& peak, int w,
                             const Entry& entry, Vec<real>& centre) {
  using Int = typename Lane<real>::Int;
  centre = Vec<real>{};
  for (int key = 0; key < columns.keys; ++key)
    centre = select<real>(peak.key == Int(key), entry(key), centre);
  Vec<real> sum{};
  for (int key = 0; key < columns.keys; ++key) {
    const Vec<real> a = load<real>(columns.s + key * columns.stride + w * kLanes<real>);
    sum += a * select<real>(a == Vec<real>{}, a, entry(key) - centre);
  }
  return sum;
}

/// The weights of softmax1 in one column, written to `a`, and sums over its keys and the further
/// logit.
template <class real, bool kLimited>
class ColumnWithZero {
 public:
  ColumnWithZero(const Rows<real, true>& rows, int n, real* a)
      : column_(rows, n), a_(a + n * rows.step) {
    Peak<real> peaks[1];
    column_.find_peaks(peaks);
    peak_ = peaks[0];
    of_zero_ = exp_flushed<real>(-peak_.logit);
    Vec<real> sum = of_zero_;
    column_.for_keys([&](int, int key, Vec<real> logit, const real*, const real*) {
      const Vec<real> e = exp_flushed<real>(logit - peak_.logit);
      store<real>(weight_at(key), e);
      sum += e;
    });
    const Vec<real> inverse = column_.inverse(0, sum);
    of_zero_ *= inverse;
    for (int key = 0; key < column_.keys; ++key)
      store<real>(weight_at(key), load<real>(weight_at(key)) * inverse);
  }

  real* weight_at(int key) const { return a_ + key * column_.stride; }
  Vec<real> weight(int key) const { return load<real>(weight_at(key)); }

  /// x - sum(A x) of entries x(key), and of the further logit, whose entry is `of_zero`. All are
  /// centred at the entry of the largest weight, and 0 where a key has the weight 0.
  template <class Entry>
  struct Centred {
    const ColumnWithZero& column;
    const Entry entry;
    Vec<real> centre, mean, zero;  // mean of what is centred

    Vec<real> operator()(int key) const {
      const Vec<real> a = column.weight(key);
      return select<real>(a == Vec<real>{}, a, (entry(key) - centre) - mean);
    }
  };

  template <class Entry>
  Centred<Entry> centred(const Entry& entry, Vec<real> of_zero) const {
    using Int = typename Lane<real>::Int;
    Centred<Entry> out{*this, entry, of_zero, {}, {}};
    for (int key = 0; key < column_.keys; ++key)
      out.centre = select<real>(peak_.key == Int(key), entry(key), out.centre);
    out.mean = of_zero_ * (of_zero - out.centre);
    for (int key = 0; key < column_.keys; ++key) {
      const Vec<real> a = weight(key);
      out.mean += a * select<real>(a == Vec<real>{}, a, entry(key) - out.centre);
    }
    out.zero = (of_zero - out.centre) - out.mean;
    return out;
  }

  /// sum(A x) of what `centred` gives; 0 for a row that sees no key.
  template <class Entry>
  Vec<real> sum(const Centred<Entry>& of) const {
    Vec<real> seen = of_zero_;
    for (int key = 0; key < column_.keys; ++key) seen += weight(key);
    return select<real>(seen == Vec<real>{}, seen, of.centre + of.mean);
  }

 private:
  const Columns<real, 1, kLimited, true> column_;
  real* const a_;
  Peak<real> peak_;
  Vec<real> of_zero_;
};

/// `kDerivative`: D and its derivative; else A and its derivative.
template <bool kDerivative, bool kLimited, class real>
void tangent_of_softmax1(const TangentArguments<real>& in) {
  const Rows<real, true> rows{in.keys, in.columns, in.stride, in.s, in.ds, in.limits};
  const Vec<real> none{};
  for (int n = 0; n < in.columns; ++n) {
    const ColumnWithZero<real, kLimited> column(rows, n, in.a);
    const Index at = n * rows.step;
    const auto entry_of = [&](const real* x) {
      return [=](int key) { return load<real>(x + at + key * in.stride); };
    };
    const auto move = column.centred(entry_of(in.ds), none);
    if constexpr (!kDerivative) {
      for (int key = 0; key < in.keys; ++key)
        store<real>(in.da + at + key * in.stride, column.weight(key) * move(key));
    } else {
      const auto b = column.centred(entry_of(in.c), none);
      const auto change = entry_of(in.dc);
      const auto e = column.centred([&](int key) { return move(key) * b(key) + change(key); },
                                    move.zero * b.zero);
      store<real>(in.readouts + at, column.sum(b));
      store<real>(in.readout_tangents + at, column.sum(e));
      for (int key = 0; key < in.keys; ++key) {
        const Index place = at + key * in.stride;
        const Vec<real> a = column.weight(key), moved = a * e(key);
        store<real>(in.da + place, a * b(key));  // C is still read
        store<real>(in.dc + place, moved);
      }
      for (int key = 0; key < in.keys; ++key)
        store<real>(in.c + at + key * in.stride, load<real>(in.da + at + key * in.stride));
    }
  }
}

template <class Map, bool kDerivative, bool kLimited, class real>
void tangent_of_entries(const TangentArguments<real>& in) {
  using Math = RowMath<real, true>;
  const Rows<real> rows{in.keys, in.columns, in.stride, in.s, in.ds, in.limits};
  for_rows<kLimited>(
      rows, in.map.by_tokens, [&](int, Index at, Vec<real> factor, const auto& sees) {
        Vec<real> readout{}, moved{};
        for (int key = 0; key < in.keys; ++key) {
          const Index place = at + key * in.stride;
          const auto of_seen = [&](Vec<real> x) {
            return kLimited ? select<real>(sees(key), x, Vec<real>{}) : x;
          };
          const Vec<real> s = load<real>(in.s + place), ds = of_seen(load<real>(in.ds + place));
          const Vec<real> a = of_seen(Map().template value<Math>(s)) * factor;
          const Vec<real> slope = of_seen(Map().template derivative<Math>(s)) * factor;
          if constexpr (!kDerivative) {
            store<real>(in.a + place, a);
            store<real>(in.da + place, slope * ds);
          } else {
            const Vec<real> bend = of_seen(Map().template curvature<Math>(s)) * factor;
            const Vec<real> c = of_seen(load<real>(in.c + place));
            const Vec<real> dc = of_seen(load<real>(in.dc + place));
            readout += a * c;
            moved += slope * ds * c + a * dc;
            store<real>(in.c + place, slope * c);
            store<real>(in.dc + place, bend * ds * c + slope * dc);
          }
        }
        if constexpr (kDerivative) {
          store<real>(in.readouts + at, readout);
          store<real>(in.readout_tangents + at, moved);
        }
      });
}

template <bool kDerivative, bool kLimited, class real>
void tangent_of_map(const TangentArguments<real>& in) {
  switch (in.map.name) {
#define MHFAST_CASE(Type, name)                                             \
  case RowMapName::k##Type:                                                 \
    if constexpr (row_maps::Type::kKind == RowKind::kEntries)               \
      return tangent_of_entries<row_maps::Type, kDerivative, kLimited>(in); \
    if constexpr (row_maps::Type::kKind == RowKind::kSoftmaxWithZero)       \
      return tangent_of_softmax1<kDerivative, kLimited>(in);                \
    break;
    MHFAST_ROW_MAPS(MHFAST_CASE)
#undef MHFAST_CASE
  }
}

template <bool kDerivative, class real>
[[gnu::noinline]] void tangent_of_map(const TangentArguments<real>& in) {
  if (in.limits) return tangent_of_map<kDerivative, true>(in);
  tangent_of_map<kDerivative, false>(in);
}

template <class real>
void tangent_weights(const TangentArguments<real>& in) {
  if (!in.map.is_softmax()) return tangent_of_map<false>(in);
  const Rows<real> logits{in.keys, in.columns, in.stride, in.s, in.ds ? in.ds : in.s, in.limits};
  attend<true, real>(logits, nullptr);
  if (!in.ds) return;
  // From here on S holds A: its largest entry is the row's peak.
  const Rows<real> rows{in.keys, in.columns, in.stride, in.s, in.ds};
  for_columns_of<false>(rows, [](const auto& columns, const auto& peaks) {
    for (int w = 0; w < std::decay_t<decltype(columns)>::kWidth; ++w) {
      real* ds = columns.c + w * kLanes<real>;
      Vec<real> centre;
      const auto entry = [&](int key) { return load<real>(ds + key * columns.stride); };
      const Vec<real> p = centred_sum(columns, peaks[w], w, entry, centre);
      for (int key = 0; key < columns.keys; ++key) {
        const Vec<real> a = load<real>(columns.s + w * kLanes<real> + key * columns.stride);
        const Vec<real> move = (entry(key) - centre) - p;
        store<real>(ds + key * columns.stride, select<real>(a == Vec<real>{}, a, move));
      }
    }
  });
}

template <class real>
void tangent_derivative(const TangentArguments<real>& in) {
  if (!in.map.is_softmax()) return tangent_of_map<true>(in);
  const Rows<real> rows{in.keys, in.columns, in.stride, in.s, in.c};
  for_columns_of<false>(rows, [&](const auto& columns, const auto& peaks) {
    for (int w = 0; w < std::decay_t<decltype(columns)>::kWidth; ++w) {
      const Index at = columns.at + w * kLanes<real>;
      const auto load_at = [&](const real* x, int key) {
        return load<real>(x + at + key * columns.stride);
      };
      const auto coefficient = [&](int key) { return load_at(in.c, key); };
      Vec<real> centre;
      const Vec<real> p = centred_sum(columns, peaks[w], w, coefficient, centre);
      // A row that sees no key has weights 0; its readout is 0 as well.
      const IntVec<real> sees = peaks[w].logit != Vec<real>{};
      store<real>(in.readouts + at, select<real>(sees, centre + p, Vec<real>{}));
      const auto b = [&](int key) { return (coefficient(key) - centre) - p; };
      const auto e = [&](int key) { return load_at(in.ds, key) * b(key) + load_at(in.dc, key); };
      Vec<real> e_centre;
      const Vec<real> e_sum = centred_sum(columns, peaks[w], w, e, e_centre);
      store<real>(in.readout_tangents + at, select<real>(sees, e_centre + e_sum, Vec<real>{}));
      for (int key = 0; key < columns.keys; ++key) {
        const Vec<real> a = load_at(in.s, key), of_key = a * b(key);
        const Vec<real> moved = a * ((e(key) - e_centre) - e_sum);
        const IntVec<real> unseen = a == Vec<real>{};
        store<real>(in.dc + at + key * columns.stride, select<real>(unseen, a, moved));
        store<real>(in.c + at + key * columns.stride, select<real>(unseen, a, of_key));
      }
    }
  });
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
