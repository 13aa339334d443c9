// What training is asked to record, as it crosses from Python.
#pragma once

#include <optional>

#include "problem.hpp"

namespace mhfast {

/// A quantity, or a parameter whose snapshot is meant, and the buffer that its rows go to.
struct RecordOfPython {
  std::string name;
  int dataset;  // -1: training data, else index of a test set
  std::int64_t every;
  py::object buffer, sample_groups, token_groups;  // groups of attention_groups only
};

void register_records(py::module_& m);

/// Records of one training, checked: the quantity that each buffer holds, and its groups.
class RecordReader {
 public:
  /// `averages` are those that the training keeps; null: none.
  RecordReader(const Shape& s, int rank, py::ssize_t runs, std::size_t tests,
               std::size_t directions, const Averages* averages)
      : s_(s),
        rank_(rank),
        runs_(runs),
        tests_(tests),
        directions_(directions),
        averages_(averages) {}

  template <class real>
  Record read(const RecordOfPython& in) const;

 private:
  template <class T>
  void take_buffer(const RecordOfPython& in, const ArrayShape& row, Record& out) const;
  void take_groups(const RecordOfPython& in, Record& out) const;

  const Shape& s_;
  const int rank_;
  const py::ssize_t runs_;
  const std::size_t tests_, directions_;
  const Averages* const averages_;
};

}  // namespace mhfast
