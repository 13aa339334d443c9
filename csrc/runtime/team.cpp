#include "team.hpp"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tuning.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace mhfast {
namespace {

std::atomic<std::int64_t> alone_until{0};  // ms of the steady clock
std::atomic<std::int64_t> next_back_off{kFirstBackOff};

std::atomic<int> chosen_threads{0};
std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
const int kWatchForks = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
#endif

int positive_from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text ? int(std::max(0L, std::strtol(text, nullptr, 10)))
              : 0;  // "4,2" of nested OpenMP levels reads as 4
}

/// The container's quota in processors, rounded up; 0 if there is none.
int quota_processors() {
  double quota = 0, period = 0;
  if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file) {
    if (!(file >> quota >> period)) quota = 0;  // "max": no quota
  } else {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? int(std::ceil(quota / period)) : 0;
}

int usable_processors() {
  int processors = std::max(1, int(std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) processors = std::max(1, CPU_COUNT(&set));
#endif
  const int quota = quota_processors();
  return quota > 0 ? std::min(processors, quota) : processors;
}

/// If the user has set no number for mhfast. What bounds OpenMP in this thread at run time, as
/// threadpoolctl does by omp_set_num_threads, bounds mhfast too.
int threads_of_openmp() {
  static const int threads = [] {
    const int openmp = positive_from_environment("OMP_NUM_THREADS");
    return openmp > 0 ? openmp : usable_processors();
  }();
  return std::min(threads, omp_get_max_threads());
}

int threads_of_environment() {
  static const int ours = positive_from_environment("MHFAST_NUM_THREADS");
  return ours > 0 ? ours : threads_of_openmp();
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int default_threads() {
  if (forked.load(std::memory_order_relaxed)) return 1;
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  return chosen > 0 ? chosen : threads_of_environment();
}

void set_default_threads(int threads) { chosen_threads.store(threads); }

int useful_threads(int asked, std::int64_t units, double flops) {
  if (forked.load(std::memory_order_relaxed)) return 1;
  const double most = std::min(double(asked > 0 ? asked : default_threads()), double(units));
  return std::max(1, int(std::min(most, flops / kFlopsPerThread)));
}

void Barrier::wait() {
  const std::uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
    if (sleepers_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, members_, nullptr, nullptr, 0);
#endif
    return;
  }
  for (int spin = 0; spin < kSpins; ++spin) {
    if (generation_.load(std::memory_order_acquire) != generation) return;
    pause();
  }
#if defined(__linux__)
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (generation_.load(std::memory_order_seq_cst) == generation)
    syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
#else
  while (generation_.load(std::memory_order_acquire) == generation) std::this_thread::yield();
#endif
}

void TeamOrAlone::report(double seconds) {
  if (!alone_ && seconds > kLongStepSeconds) return;  // time slices do not matter
  window_seconds_ += seconds;
  ++window_steps_;
  if (window_seconds_ < kWindowSeconds) return;
  seconds_a_step_[alone_] = window_seconds_ / window_steps_;
  window_seconds_ = 0;
  window_steps_ = 0;
  if (--windows_left_ > 0) return;
  const bool other_is_unknown = seconds_a_step_[!alone_] == 0;
  const bool other_is_faster = seconds_a_step_[!alone_] < seconds_a_step_[alone_];
  const bool was_a_trial = trial_;
  trial_ = false;
  if (other_is_unknown || (!was_a_trial && !other_is_faster)) {
    alone_ = !alone_;  // measure the other way now
    trial_ = true;
    windows_left_ = 1;
    return;
  }
  // After a trial: keep the faster way, for longer the more often it has been faster.
  patience_ = other_is_faster ? std::min(2 * patience_, kLongestPatience) : kFirstPatience;
  if (other_is_faster) alone_ = !alone_;
  windows_left_ = patience_;
}

#if defined(MHFAST_STD_THREADS)  // the thread sanitizer does not know how OpenMP synchronizes
void run_team(int threads, const std::function<void(const Member&)>& body) {
  Barrier everyone(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i)
    others.emplace_back([&, i] { body(Member{i, threads, &everyone}); });
  body(Member{0, threads, &everyone});
  for (std::thread& other : others) other.join();
}
#else
void run_team(int threads, const std::function<void(const Member&)>& body) {
  if (threads <= 1) return body(Member{0, 1, nullptr});
  Barrier* everyone = nullptr;
  alignas(Barrier) unsigned char workspace[sizeof(Barrier)];
#pragma omp parallel num_threads(threads)
  {
    // OpenMP may start fewer threads than requested; the barrier counts those that exist.
#pragma omp single
    everyone = new (workspace) Barrier(omp_get_num_threads());
    body(Member{omp_get_thread_num(), omp_get_num_threads(), everyone});
  }
}
#endif

void run_short_team(int threads, double expected_seconds,
                    const std::function<void(const Member&)>& body) {
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
  };
  if (threads > 1 && milliseconds(Clock::now()) < alone_until.load(std::memory_order_relaxed))
    threads = 1;
  const auto start = Clock::now();
  run_team(threads, body);
  if (threads <= 1) return;
  const auto end = Clock::now();
  const std::int64_t back_off = next_back_off.load(std::memory_order_relaxed);
  if (std::chrono::duration<double>(end - start).count() < expected_seconds + kPreemptedSeconds) {
    next_back_off.store(kFirstBackOff, std::memory_order_relaxed);
    return;
  }
  alone_until.store(milliseconds(end) + back_off, std::memory_order_relaxed);
  next_back_off.store(std::min(2 * back_off, kLongestBackOff), std::memory_order_relaxed);
}

}  // namespace mhfast
