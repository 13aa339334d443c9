// What XLA hands to a function that it calls, as far as it is read here.
//
// XLA's "foreign function interface" is one C function with one argument, the call, whose layout in
// memory is a stable ABI: since version 0.1 fields have been added at ends only, and each struct
// begins with its size. These declarations are that layout, so that building needs no headers of
// XLA and the module none of its libraries; XLA compares versions when a function is registered.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mhfast::xla {

/// The version whose layout is declared here.
inline constexpr int kMajor = 0, kMinor = 1;

struct Error;  // made and destroyed by XLA

struct Extension {
  std::size_t size;
  int kind;
  Extension* next;
};

/// The extension in which XLA asks for the version instead of calling the function.
inline constexpr int kMetadata = 1;

struct Metadata {
  std::size_t size;
  std::size_t version_size;
  Extension* version_extension;
  int major, minor;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

inline constexpr int kBuffer = 1, kString = 4;  // kinds of arguments and results, of attributes

struct Buffer {
  std::size_t size;
  Extension* extension;
  int type;
  void* data;
  std::int64_t rank;
  std::int64_t* lengths;
};

struct Text {
  const char* at;
  std::size_t length;
};

/// Arguments or results.
struct Values {
  std::size_t size;
  Extension* extension;
  std::int64_t count;
  int* kinds;
  void** at;
};

struct Attributes {
  std::size_t size;
  Extension* extension;
  std::int64_t count;
  int* kinds;
  Text** names;
  void** at;
};

struct NewError {
  std::size_t size;
  Extension* extension;
  const char* message;
  int code;
};

inline constexpr int kInvalidArgument = 3, kInternal = 13;  // codes of errors

/// The functions of XLA, of which only the first is called.
struct Api {
  std::size_t size;
  Extension* extension;
  std::size_t version_size;
  Extension* version_extension;
  int major, minor;
  const void* internal;
  Error* (*new_error)(NewError*);
};

inline constexpr int kExecute = 3;  // the stage in which arguments have values

struct Call {
  std::size_t size;
  Extension* extension;
  const Api* api;
  void* context;
  int stage;
  Values arguments;
  Values results;
  Attributes attributes;
};

}  // namespace mhfast::xla
