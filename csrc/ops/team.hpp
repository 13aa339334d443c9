// Threads: how many, and a team of them inside one OpenMP parallel region.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace mhfast {

/// Threads to use when a call does not say: what set_default_threads set, else the environment's
/// MHFAST_NUM_THREADS, else OMP_NUM_THREADS, else the processors that affinity and the container's
/// quota leave to this process. In a forked child always 1: the parent's OpenMP threads do not
/// exist there and a parallel region would wait for them for ever.
int default_threads();
void set_default_threads(int threads);

/// As many threads as asked for (0: the default), but no more than `units` of work, nor so many
/// that one gets less than a few microseconds of work: `flops` is the size of the whole.
int useful_threads(int asked, std::int64_t units, double flops);

/// Whether other work occupies the processors. A team waits for its slowest member: while another
/// process holds a processor, a job of .1 ms takes a time slice of several ms. Once a team was seen
/// to take far longer than its work can, one thread works alone for a while, longer each time in a
/// row, before a team is tried again. Shared by the whole process; results do not depend on it.
bool processors_are_busy();
void report_team_time(double seconds, double leisurely_seconds);

/// Where all members of a team wait for each other: a short spin, then sleep.
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

/// Runs `body` on each member of a team of at most `threads`, or on one if processors are busy. The
/// body must not throw. `leisurely_seconds`: what the whole would take one slow thread.
void run_team(int threads, double leisurely_seconds,
              const std::function<void(const Member&)>& body);

}  // namespace mhfast
