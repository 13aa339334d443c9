// Threads: how many, and a team of them inside one OpenMP parallel region.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace mhfast {

/// Threads to use when a call does not say: what set_default_threads set, else the environment's
/// MHFAST_NUM_THREADS, else OMP_NUM_THREADS or the processors that affinity and the container's
/// quota leave to this process, at most as many as OpenMP is bound to in the calling thread. In a
/// forked child always 1: the parent's OpenMP threads do not exist there and a parallel region
/// would wait for them for ever.
int default_threads();
void set_default_threads(int threads);

/// The requested number of threads (0: the default), but no more than `units` of work, nor so many
/// that one has less than a few microseconds of work: `flops` is the total.
int useful_threads(int asked, std::int64_t units, double flops);

/// Whether the steps of a long loop are faster with all threads or with one thread. A team waits
/// for its slowest member several times per step, which can take a time slice each time if other
/// processes use the processors. Both ways are therefore timed, in windows of a few ms, the faster
/// one is kept, and the other is tried again from time to time. Results do not depend on the
/// choice.
class TeamOrAlone {
 public:
  /// Reports one step, `seconds` after the one before.
  void report(double seconds);
  bool alone() const { return alone_; }

 private:
  bool alone_ = false, trial_ = false;
  double window_seconds_ = 0;
  int window_steps_ = 0;
  double seconds_a_step_[2] = {0, 0};  // of the team, of one thread; 0: not known
  int windows_left_ = 1, patience_ = 4;
};

/// A barrier for the members of a team: a short spin, then sleep.
class Barrier {
 public:
  explicit Barrier(int members) : members_(members) {}
  void wait();

 private:
  const int members_;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> sleepers_{0};
};

struct Member {
  int index, count;
  Barrier* everyone;
  void wait() const {
    if (count > 1) everyone->wait();
  }
};

/// Runs `body` on each member of a team of at most `threads`. The body must not throw.
void run_team(int threads, const std::function<void(const Member&)>& body);

/// The same for a short job, whose expected upper time with one thread is `expected_seconds`. If a
/// team takes far longer, other processes have preempted it; then one thread does such jobs for a
/// back-off period, which grows each time in a row, before a team is tried again. The back-off is
/// shared by the whole process.
void run_short_team(int threads, double expected_seconds,
                    const std::function<void(const Member&)>& body);

}  // namespace mhfast
