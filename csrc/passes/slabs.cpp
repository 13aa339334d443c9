#include "slabs.hpp"

namespace mhfast {

template <class real>
SlabPass<real>::SlabPass(PassState<real>& state, const Sizes& sizes)
    : ChunkPass<real>(state),
      sizes_(sizes),
      steps_(state, sizes.rows),
      projections_(state),
      workspaces_(state.threads, Workspace(WordLists<real>(state, sizes.rows))),
      key_size_(state.data.has_words() ? 0
                                       : state.data.shape.d * state.lanes.rows(state.data.shape.T)),
      query_size_(
          state.data.has_words() ? 0 : state.data.shape.d * state.lanes.rows(state.data.shape.q)) {}

/// Of slabs with the caller's own loss, see tuning.hpp.
template <class real>
void SlabPass<real>::choose_block() {
  if (!state_.own.takes_blocks()) return;
  const std::ptrdiff_t units = slab_units();
  const std::ptrdiff_t slabs_of_chunk =
      (state_.plan.units / state_.plan.chunks + units) / units * tiles();
  const double of_slab = double(units) * (state_.lanes.laned ? state_.lanes.lanes : 1) *
                         output_rows(sizes_.rows) * state_.data.shape.row_outputs();
  block_ = state_.own.slabs_of_block(double(slabs_of_chunk), of_slab,
                                     keeps_weights() ? kept_bytes(units) : 0);
}

template <class real>
void SlabPass<real>::lay_out(Arena& layout) {
  choose_block();
  const Shape& s = state_.data.shape;
  const Data<real>& data = state_.data;
  const std::size_t units = slab_units(), held = this->held();
  const std::size_t weights = units * steps_.weights_size(), H = s.H, block = block_;
  const std::size_t own =
      state_.own.exists() ? held * output_rows(sizes_.rows) * s.row_outputs() : 0;
  for (int thread = 0; thread < state_.threads; ++thread) {
    Workspace& workspace = workspaces_[thread];
    HeadMemory<real>& heads = workspace.heads;
    workspace.x = packed_ ? nullptr : layout.take<real>(units * key_size_);
    workspace.z = packed_ || !data.has_z() ? workspace.x : layout.take<real>(units * query_size_);
    workspace.y = packed_ ? nullptr : layout.take<real>(units * sizes_.unit_targets);
    const std::ptrdiff_t of_chunk =
        (state_.plan.units + state_.plan.chunks - 1) / state_.plan.chunks;
    const bool adds = state_.options.gradient && slabs(of_chunk) > 1;
    workspace.laned = layout.take<real>(adds ? state_.gradients.laned_size() : 0);
    const std::size_t rows_size = sizes_.heads * steps_.rows_size();
    heads.limits = layout.take<real>(data.is_limited() ? units * rows_size : 0);
    heads.scores.p = layout.take<real>(sizes_.heads * units * query_size_ * (s.rank > 0 ? 2 : 1));
    heads.scores.s = layout.take<real>(block * heads_kept() * weights);
    heads.scores.c = layout.take<real>(block * sizes_.derivatives * weights);
    heads.scores.readout = layout.take<real>(sizes_.readouts * held);
    heads.scores.row_readouts = layout.take<real>(rows_size);
    heads.scores.row_gaps = layout.take<real>(rows_size);
    heads.gap = layout.take<real>(state_.options.gaps ? block * H * held : 0);
    heads.log_derivative = layout.take<double>(held);
    heads.factors = layout.take<real>(held);
    workspace.own.lay_out(layout, block * own);
    workspace.words.lay_out(layout, units);
    lay_out_readout(layout, thread, units);
    if (projections_.exist()) projections_.lay_out(layout, thread, units);
    if (!state_.options.gradient) continue;
    heads.keys = layout.take<real>(projections_.exist() ? 0 : steps_.row_size(units) * s.T);
    heads.e = layout.take<real>(steps_.scratch_size(units, s.q * sizes_.heads));
  }
}

template <class real>
std::shared_ptr<Packed<real>> SlabPass<real>::make_packed() const {
  const Data<real>& data = state_.data;
  const std::ptrdiff_t units = state_.plan.units;
  const bool external = data.has_z();
  auto packed = std::make_shared<Packed<real>>();
  const auto lay_out = [&](Arena layout) {
    packed->x = layout.template take<real>(units * key_size_);
    packed->z = external ? layout.template take<real>(units * query_size_) : packed->x;
    packed->y = layout.template take<real>(data.y ? units * sizes_.unit_targets : 0);
    return layout.size();
  };
  lay_out(Arena(packed->block.reserve(lay_out(Arena()))));
  return packed;
}

/// Packs units `first` to `last` of arrays (n, rows, columns).
template <class real>
void SlabPass<real>::pack(const real* from, std::ptrdiff_t run, int rows, int columns,
                          std::ptrdiff_t first, std::ptrdiff_t last, real* to) const {
  const Kernels<real>& kernels = state_.kernels;
  const int L = kernels.lanes, padded = int(round_up(rows, L));
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * columns;
  for (std::ptrdiff_t u = first; u < last; ++u) {
    if (state_.plan.samples_are_lanes()) {
      const int valid = int(std::min<std::ptrdiff_t>(L, state_.data.shape.n - u * L));
      kernels.pack_lanes(from + u * L * size, size, valid, size, to);
      to += size * L;
    } else if (state_.plan.runs_are_lanes()) {
      // Lanes without a run get what all share, too, because others may use the result.
      kernels.pack_lanes(from + u * size, run, run == 0 ? L : state_.data.runs, size, to);
      to += size * L;
    } else {
      kernels.pack_rows(from + u * size, rows, columns, padded, to);
      to += std::ptrdiff_t(columns) * padded;
    }
  }
}

/// The same of tokens, `rows` of a sample.
template <class real>
void SlabPass<real>::pack_tokens(const real* from, std::ptrdiff_t run, int rows,
                                 std::ptrdiff_t first, std::ptrdiff_t last, real* to) const {
  const Shape& s = state_.data.shape;
  if (!projections_.packs_rows()) return pack(from, run, rows, s.d, first, last, to);
  const std::ptrdiff_t L = state_.lanes.lanes, size = std::ptrdiff_t(rows) * s.d;
  for (std::ptrdiff_t u = first; u < last; ++u, to += L * size)
    projections_.pack(from + u * L * size, int(std::min<std::ptrdiff_t>(L, s.n - u * L)), rows, to);
}

template <class real>
void SlabPass<real>::pack_all(const Member& member) {
  if (!packed_) return;
  const Data<real>& data = state_.data;
  const Shape& s = data.shape;
  const std::ptrdiff_t units = state_.plan.units, targets = sizes_.unit_targets;
  const std::ptrdiff_t first = units * member.index / member.count,
                       last = units * (member.index + 1) / member.count;
  if (!data.has_words())
    pack_tokens(data.x, data.run.x, s.T, first, last, packed_->x + first * key_size_);
  if (packed_->z != packed_->x)
    pack_tokens(data.z, data.run.z, s.q, first, last, packed_->z + first * query_size_);
  if (targets && data.y)
    pack(data.y, data.run.y, int(data.targets), 1, first, last, packed_->y + first * targets);
}

template <class real>
void SlabPass<real>::run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                               int thread) {
  const std::ptrdiff_t slabs = this->slabs(last - first);
  state_.own.run(pass, 0, slabs, block_, workspaces_[thread].own,
                 [&](Pass phase, std::ptrdiff_t begin, std::ptrdiff_t end) {
                   return run_slabs(phase, chunk, first, last, begin, end, thread);
                 });
  if (is_gradient(pass) && slabs > 1 && state_.gradients.laned_size() > 0)
    state_.gradients.sum_lanes(chunk, workspaces_[thread].laned);
}

/// Works on slabs `begin` to `end` of the chunk of units `first` to `last`; a slab is some units
/// and, of a long layer, some rows of them. Returns the rows with outputs of their own.
template <class real>
std::ptrdiff_t SlabPass<real>::run_slabs(Pass pass, int chunk, std::ptrdiff_t first,
                                         std::ptrdiff_t last, std::ptrdiff_t begin,
                                         std::ptrdiff_t end, int thread) {
  const Workspace& workspace = workspaces_[thread];
  const bool in_block = state_.own.takes_blocks(pass);
  std::ptrdiff_t rows = 0;
  Slab<real> slab{};
  for (std::ptrdiff_t i = begin; i < end; ++i) {
    const int tile = int(i % tiles());
    if (tile == 0 || i == begin) {
      const std::ptrdiff_t unit = first + i / tiles() * state_.plan.slab;
      slab = open_slab(unit, std::min(unit + state_.plan.slab, last), workspace);
      slab.first = unit == first;
      slab.laned =
          slabs(last - first) > 1 && state_.gradients.laned_size() > 0 ? workspace.laned : nullptr;
    }
    slab.first_row = tile * sizes_.rows;
    slab.rows = std::min(sizes_.rows, state_.data.shape.q - slab.first_row);
    slab.follows = tile > 0;
    slab.place = in_block ? int(i - begin) : 0;
    slab.heads = pass == Pass::kScaledGradient ? 1 : sizes_.heads;
    slab.row = in_block ? rows : 0;
    rows += state_.entries(slab) * output_rows(slab.rows);
    if (state_.data.is_limited()) find_limits(slab, workspace.heads.limits);
    run_slab(pass, chunk, slab, thread);
  }
  return rows;
}

template <class real>
Slab<real> SlabPass<real>::open_slab(std::ptrdiff_t first, std::ptrdiff_t last,
                                     const Workspace& workspace) const {
  const Data<real>& data = state_.data;
  const Shape& s = data.shape;
  const std::ptrdiff_t samples_in_unit = state_.lanes.samples_in_unit;
  Slab<real> slab{};
  slab.first_sample = first * samples_in_unit;
  slab.units = int(last - first);
  slab.samples = int(std::min(last * samples_in_unit, s.n) - slab.first_sample);
  slab.keys = s.T;
  slab.rows = s.q;
  slab.words = state_.words_of(slab.first_sample, 0);
  workspace.words.find(slab);
  if (packed_) {
    slab.x = packed_->x + first * key_size_;
    slab.z = data.self ? slab.x : packed_->z + first * query_size_;
    slab.y = packed_->y + first * sizes_.unit_targets;
  } else {
    if (!data.has_words()) pack_tokens(data.x, data.run.x, s.T, first, last, workspace.x);
    if (workspace.z != workspace.x) pack_tokens(data.z, data.run.z, s.q, first, last, workspace.z);
    if (sizes_.unit_targets && data.y)
      pack(data.y, data.run.y, int(data.targets), 1, first, last, workspace.y);
    slab.x = workspace.x;
    slab.z = workspace.z;
    slab.y = workspace.y;
  }
  return slab;
}

/// Keys that each row of the slab sees, in the layout of a row of scores.
template <class real>
void SlabPass<real>::find_limits(const Slab<real>& slab, real* to) const {
  const Data<real>& data = state_.data;
  const int L = state_.lanes.lanes, rows_size = int(steps_.rows_size());
  if (state_.lanes.laned) {
    for (int u = 0; u < slab.units; ++u)
      for (int t = 0; t < slab.rows; ++t) {
        for (int l = 0; l < L; ++l) {
          const int entry = u * L + l;
          const bool is_sample = entry < state_.entries(slab);
          to[l] = real(is_sample ? data.limit(state_.sample_of(slab, entry), state_.run_of(entry),
                                              slab.first_row + t)
                                 : data.shape.T);
        }
        for (int h = 1; h < slab.heads; ++h) std::copy_n(to, L, to + h * L);
        to += slab.heads * L;
      }
    return;
  }
  for (int i = 0; i < slab.samples; ++i, to += rows_size)
    data.write_limits(slab.first_sample + i, 0, data.shape.q, rows_size, to);
}

template <class real>
void SlabPass<real>::write_attention(Pass pass, const Slab<real>& slab, const real* a) const {
  if (!state_.attention || pass == Pass::kScaledGradient) return;
  const Shape& s = state_.data.shape;
  const int L = state_.lanes.lanes, rows = s.q * slab.heads;  // those that lie side by side
  const std::ptrdiff_t key = std::ptrdiff_t(rows) * L, of_head = std::ptrdiff_t(s.q) * s.T;
  if (!state_.lanes.laned) {
    const std::ptrdiff_t row = steps_.rows_size();
    for (int h = 0; h < s.H; ++h)
      for (int u = 0; u < slab.units; ++u, a += s.T * row)
        state_.kernels.turn_weights(
            a, row, s.T, s.q, state_.attention + ((slab.first_sample + u) * s.H + h) * of_head,
            s.T);
    return;
  }
  for (int h = 0; h < s.H; h += slab.heads)
    for (int u = 0; u < slab.units; ++u, a += s.T * key) {
      const std::ptrdiff_t sample = slab.first_sample + std::ptrdiff_t(u) * L;
      state_.kernels.unpack_weights(a, key, s.T, rows, std::min(L, slab.samples - u * L),
                                    state_.attention + (sample * s.H + h) * of_head, s.H * of_head);
    }
}

template class SlabPass<float>;
template class SlabPass<double>;

}  // namespace mhfast
