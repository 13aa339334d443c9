// The sizes and times that the drivers choose, one name for one value. None changes what is
// computed, except in which order partial sums are added.
//
// Each is *chosen*, by the reasoning that its comment gives, or *fitted* to timings of one machine
// with AVX2, which are not kept. `python -m benchmarks.plans` times every plan of some shapes on
// the machine at hand, next to the cycles that the fitted numbers predict.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mhfast {

inline constexpr std::size_t kKilobyte = 1024, kMegabyte = 1024 * kKilobyte;

// Passes over the data ------------------------------------------------------------------------

// Chosen. Weights of a slab (A and D of all heads): they should still be in the second-level cache,
// 1 MB or less on most machines, when the gradient reads them.
inline constexpr double kSlabBytes = 384 * kKilobyte;
// Chosen. Above this the weights of a single unit are not kept, and the scores are computed twice.
inline constexpr double kKeepBytes = 8 * kMegabyte;
// Chosen. Above this the weights of one unit and one head are not stored at all, and tiles are
// used.
inline constexpr double kUnitBytes = 2 * kMegabyte;
// Chosen. A Python function for the loss is called for so many slabs that the weights of all are
// still in a second-level cache of usual size afterwards, or for so many outputs where there are no
// weights; and for so much work that the 15 microseconds or so of a call are little next to it.
inline constexpr double kOwnLossBytes = 1 * kMegabyte, kOwnLossCycles = 400000;
inline constexpr std::ptrdiff_t kOwnLossOutputs = 1 << 15;
// Chosen. Rows of a slab: beyond, loading and storing the accumulators of a gradient is a small
// part of its products.
inline constexpr int kSlabRows = 256;

// Chosen. Weights of a tile (A and D of its rows), for the second-level cache as well, and the
// query rows of a sample that one thread does in sequence.
inline constexpr double kTileBytes = 128 * kKilobyte;
inline constexpr int kPartRows = 512;
// Fitted. Registers of query rows of a tile where rows see no later token: with more, tiles go
// through more keys that most of their rows do not see, with fewer, products are short.
inline constexpr int kCausalTileVectors = 2;
// Chosen. Tokens and query rows from which products of keys, with V or with a factor of W, come
// before the weights: with fewer, other plans than rows and tiles can be faster.
inline constexpr int kLongTokens = 128;
// Features from which tokens of samples with so few weights are multiplied with the factors of W
// and with V or U first, fitted, as fewer are met by two products alone; weights chosen, as those
// of all heads and of as many samples as lanes are kept.
inline constexpr int kProjectedFeatures = 16, kProjectedWeights = 400;
// Chosen. Lanes for each sample from which on these products have tokens as lanes.
inline constexpr double kIdleProjections = 1.5;
// Chosen. Gradients of the samples of a slab of tiles, one for each sample, head and part.
inline constexpr double kTileGradientBytes = 16 * kMegabyte;

// Chosen. Chunks: at least kFewChunks (or cycles / kChunkCycles), so that any usual number of
// threads has work, at most kManyChunks, and so many that writing and adding their partial
// gradients stays below kReductionShare of the cycles; and the memory of all partial gradients.
inline constexpr double kFewChunks = 8, kManyChunks = 64, kChunkCycles = 10000;
inline constexpr double kReductionShare = 0.015;
inline constexpr double kPartialBytes = 32 * kMegabyte;

// Chosen. Rows of all samples for each feature up to which D X of every row is kept, in place of a
// gradient by W for each of kFewChunks chunks, each of which is written and read.
inline constexpr double kRowGradients = kFewChunks / 2;
// Chosen. Rows of such a gradient that a thread computes at a time: D X is read anew for each.
inline constexpr int kGradientRows = 128;

// Counted. Bytes after which addresses meet the same set of a first-level cache. Rows of a large W
// that are a multiple of it apart are copied, which saves a twentieth of the products by inputs;
// elsewhere a copy costs as much or, beyond the caches, a fifth.
inline constexpr std::size_t kSetBytes = 4 * kKilobyte;

// The cost model ------------------------------------------------------------------------------

// Fitted. Cycles of starting a chunk, and bytes per cycle of copying and adding partial gradients.
inline constexpr double kBeginCycles = 2000, kCopyBytes = 8;
// Fitted. Cycles of a step of training besides its gradient, of one run and of runs side by side in
// lanes.
inline constexpr double kStepCycles = 2500, kLanesStepCycles = 4500;
// Chosen, a little below the smallest caches in use; fitted: bytes per cycle beyond them.
inline constexpr double kFirstLevelBytes = 24 * kKilobyte, kSecondLevelBytes = 400 * kKilobyte;
inline constexpr double kStreamBytes = 12;
// Fitted. Cycles of a multiply-add of a register, two of which could start in a cycle: operands
// that all lanes share, and laned ones, which take more loads; of a tile of a product besides its
// multiply-adds; and of loading and storing a register of the result.
inline constexpr double kSharedProductCycles = 0.53, kLanedProductCycles = 0.63;
inline constexpr double kTileCycles = 20, kStoreCycles = 0.5;
// Fitted. Cycles of softmax, readout and derivative of a register of one key, and what is added
// beyond the first and the second level of the cache.
inline constexpr double kSoftmaxCycles32 = 14, kSoftmaxCycles64 = 19;
inline constexpr double kFirstLevelCycles = 4, kSecondLevelCycles = 12;
// Fitted. Cycles of adding a sample to a register of the gradients of runs that are lanes, where
// those of all heads take more bytes than this: each sample goes through all of them.
inline constexpr double kGradientCycles = 1.5, kRunGradientBytes = 100 * kKilobyte;
// Fitted. Cycles to sum a register of a gradient over lanes that are samples.
inline constexpr double kLaneSumCycles = 2.5;
// Fitted. Cycles of a register of keys with features as lanes, where scores of a layer have samples
// as theirs: a copy for all heads, and products of few rows for each; and with gradients by
// factors, whose products have few columns.
inline constexpr double kKeyCycles = 4, kFactorKeyCycles = 12;
// Counted: to transpose a register of numbers, square by square.
inline constexpr double kTransposeCycles = 3;
// Chosen. Numbers of a row of W for each of the rank from which on factors are multiplied with one
// by one, which takes 2 r in place of d multiply-adds of a number, and their gradients 4 r in place
// of d; the rest is for further products of fewer rows.
inline constexpr int kFactorColumns = 3, kGradientColumns = 5;
// Fitted. To put a number of a token of a sample, which is the lane, where it belongs.
inline constexpr double kGatherCycles = 3;
// Counted: to look up the logit of a pair of words, and to add its derivative to that of the pair.
inline constexpr double kWordCycles = 4;

// Chosen: of an output of attended tokens, its loss and derivative.
inline constexpr double kOutputCycles = 15;

// Steps that change the readout alone -------------------------------------------------------------

// Chosen. Attended tokens that are kept for all steps, of all runs; beyond, they are computed again
// at each step, as where W is trained.
inline constexpr double kAttendedBytes = 256 * kMegabyte;
// Chosen. Steps in coefficients of the samples that must save what it takes to enter them. Not
// those of a call, which may be a part of a training.
inline constexpr double kCoefficientSteps = 100;
// Counted: numbers of a readout that a step reads and writes besides its products.
inline constexpr double kUpdateColumns = 4;
// Measured: cycles of a vector of the products of all features with each other, and of a feature
// that becomes double, in memory that is new; in those of a vector of a step, which comes from the
// second-level cache.
inline constexpr double kGramCycles = 0.25, kConversionCycles = 2;

// Batches ----------------------------------------------------------------------------------------

// Chosen. Samples of a batch whose rows are asked for before they are copied, and bytes of each,
// the rest of which the processor then foresees.
inline constexpr std::ptrdiff_t kPrefetchRows = 3, kPrefetchBytes = 1024;

// Gradients by inputs and Hessian-vector products -----------------------------------------------

// Chosen. A and D of the query rows that go together, with their transposed copies: what the tokens
// leave of a second-level cache.
inline constexpr std::size_t kInputTileBytes = 256 * kKilobyte;
// Chosen. A, D, tokens and their gradient of a block of samples, which are lanes, for the
// second-level cache.
inline constexpr double kBlockBytes = 512 * kKilobyte;
// Fitted. Blocks of samples, and query rows of each, from which and up to which they take no longer
// than rows as lanes where both fill the lanes as well; otherwise they take so many times as long.
inline constexpr double kInputBlocks = 4, kInputBlockRows = 12, kBlockCost = 1.2;
// Fitted. From so many blocks on and up to so many rows blocks of a classifier take no longer, and
// those of a layer so many times as long, as rows whose features fill the lanes.
inline constexpr double kFewInputBlocks = 3, kFewInputBlockRows = 32, kLayerBlockCost = 1.3;
// Chosen. Query rows of several samples that are multiplied with W and V at once.
inline constexpr int kInputRows = 32;
// Fitted. Features from which a layer's outputs are found in the pass of gradients by inputs, which
// saves products with W but takes A X by rows: with 20 and 64 heads that takes a twentieth longer,
// with 40 and more a seventh less or a quarter.
inline constexpr int kFoundFeatures = 32;
// Chosen. A, D and their tangents of a tile of rows, all heads: they stay in the second-level
// cache.
inline constexpr double kTangentTileBytes = 512 * kKilobyte;
// Chosen. All of a block of samples, which are lanes: what stays in a second-level cache of usual
// size.
inline constexpr double kTangentBlockBytes = 1 * kMegabyte;
// Chosen. Query rows of several samples that are multiplied with W at once, at most: they fill a
// tile of a product.
inline constexpr int kTangentRows = 64;
// Chosen. Chunks of samples that threads share, and the memory of all their partial sums.
inline constexpr int kTangentChunks = 16;
inline constexpr double kTangentPartialBytes = 48e6;

// Sums over rows for the learner ------------------------------------------------------------------

// Chosen. Columns of a block of the result, rows of a product, so that its panels stay in the
// first-level cache (96 rows of 64 columns are 48 kB), and the rows held at a time: one thread
// takes a fifth less time with 0.5 MB, in the second-level cache, than with 8 MB; threads wait for
// each other twice for each portion, so that theirs are larger.
inline constexpr int kGramColumns = 64, kGramRows = 96;
inline constexpr std::size_t kGramPortionBytes = 512 * kKilobyte,
                             kGramTeamPortionBytes = 8 * kMegabyte;
inline constexpr std::int64_t kGramPortionRows = 1 << 16;

// Linear attention --------------------------------------------------------------------------------

// Chosen. Tokens for each feature from which the triangular factor of the tokens is worth a copy,
// and the rows that a reflection takes at a time, which should stay in the second-level cache.
inline constexpr double kFewerKeys = 1.5;
inline constexpr int kTriangleRows = 32;
// Chosen. Factors that a call keeps at a time, or that are computed before steps on batches; a
// gradient may keep more of samples with at least kManyTokens tokens for each feature, of which
// they are a small part.
inline constexpr double kTriangleBytes = 16 * kMegabyte, kManyTokens = 8;
// Fitted. Multiply-adds of the products of a head that take as long as a factor's T d^2.
inline constexpr double kTriangleProducts = 4;

// Chosen. Products of tokens that are kept for all steps, of all runs; beyond, steps are from the
// triangular factor or from the tokens. Blocks of samples that go together.
inline constexpr double kProductBytes = 256 * kMegabyte, kProductBlocks = 8;
inline constexpr double kProductSlabBytes = 64 * kKilobyte;
// Fitted. Cycles of an entry of the tensor of a step, and of its gradient, besides products.
inline constexpr double kTensorCycles = 2;

// Memory and threads ------------------------------------------------------------------------------

// Chosen. The workspace that a thread keeps between calls; a larger one is freed at once, and its
// pages, which the system clears, cost the next call more than most of what it computes. All
// partial gradients and as much again for the rest.
inline constexpr std::size_t kKeptScratch = 2 * std::size_t(kPartialBytes);
// Chosen. Arrays for a moment that the process keeps: two of kernels.
inline constexpr std::size_t kKeptArrays = 16 * std::size_t(kMegabyte);

// Chosen. The least work of a thread: some ten microseconds, to be worth waking it up and two
// barriers.
inline constexpr double kFlopsPerThread = 4e5;
// Chosen. Flops per second and lane of a thread that is slow but not preempted.
inline constexpr double kSlowFlops = 5e8;
// Chosen. Checks of the generation before a waiting thread sleeps: longer spinning gains nothing if
// cores are idle and costs whole time slices if they are busy.
inline constexpr int kSpins = 500;

// Chosen. If a short job took this much longer than its expected upper time, a thread was
// preempted, since time slices take milliseconds; then one thread works alone for a first back-off
// period, which doubles up to the longest.
inline constexpr double kPreemptedSeconds = 0.002;
inline constexpr std::int64_t kFirstBackOff = 50, kLongestBackOff = 1600;  // ms

// Chosen. Long loops: length of the windows that are compared, for how many windows the faster way
// is kept, and the duration of a step beyond which time slices do not matter.
inline constexpr double kWindowSeconds = 0.004, kLongStepSeconds = 0.05;
inline constexpr int kFirstPatience = 8, kLongestPatience = 64;

// Chosen. A person does not notice it: how often training looks for signals and reports progress,
// in milliseconds, and how often runs side by side are brought to a common step for that.
inline constexpr int kProgressInterval = 50;
// Measured: a look at the clock takes a twentieth of the shortest steps. Of calls that may look one
// in this many does, more of them where that takes so many milliseconds.
inline constexpr int kMostCallsOfLook = 64, kLookInterval = 2;
inline constexpr double kSegmentSeconds = 0.03;

}  // namespace mhfast
