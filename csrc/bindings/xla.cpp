#include "xla.hpp"

#include <pybind11/numpy.h>

#include <array>
#include <stdexcept>
#include <string>

#include "register.hpp"

namespace mhfast {
namespace {

namespace py = pybind11;

struct Type {
  int number;  // in XLA
  const char* name;
};

constexpr std::array<Type, 10> kTypes{{{11, "float32"},
                                       {12, "float64"},
                                       {2, "int8"},
                                       {3, "int16"},
                                       {4, "int32"},
                                       {5, "int64"},
                                       {6, "uint8"},
                                       {7, "uint16"},
                                       {8, "uint32"},
                                       {9, "uint64"}}};

/// What XLA's calls are passed to; set once, and never released, since XLA may call at any time.
PyObject* function = nullptr;

/// The dtypes of `kTypes`, in its order.
PyObject* dtypes = nullptr;

py::dtype dtype_of(const xla::Buffer& buffer) {
  for (std::size_t i = 0; i < kTypes.size(); ++i)
    if (kTypes[i].number == buffer.type)
      return py::reinterpret_borrow<py::dtype>(PyTuple_GET_ITEM(dtypes, py::ssize_t(i)));
  throw std::invalid_argument("expected real or integer arrays, got type " +
                              std::to_string(buffer.type) + " of XLA");
}

/// Arrays over the memory of XLA, which are valid during the call only.
py::tuple arrays_of(const xla::Values& values, bool writable) {
  py::tuple arrays(values.count);
  for (std::int64_t i = 0; i < values.count; ++i) {
    if (values.kinds[i] != xla::kBuffer) throw std::invalid_argument("expected arrays, got tokens");
    const auto& buffer = *static_cast<const xla::Buffer*>(values.at[i]);
    // With a base NumPy takes the memory as it is.
    py::array array(dtype_of(buffer),
                    std::vector<py::ssize_t>(buffer.lengths, buffer.lengths + buffer.rank),
                    buffer.data, py::none());
    if (!writable)
      py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    arrays[i] = std::move(array);
  }
  return arrays;
}

/// The text of the attribute "call".
py::str text_of(const xla::Attributes& attributes) {
  for (std::int64_t i = 0; i < attributes.count; ++i)
    if (attributes.kinds[i] == xla::kString &&
        std::string(attributes.names[i]->at, attributes.names[i]->length) == "call") {
      const auto& text = *static_cast<const xla::Text*>(attributes.at[i]);
      return {text.at, text.length};
    }
  throw std::invalid_argument("expected an attribute \"call\", got none");
}

xla::Error* error(const xla::Call& call, int code, const char* message) {
  xla::NewError made{sizeof made, nullptr, message, code};
  return call.api->new_error(&made);
}

void state_version(xla::Extension* extension) {
  auto& metadata = *reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
  metadata.major = xla::kMajor;
  metadata.minor = xla::kMinor;
  metadata.traits = 0;
}

/// Calls the Python function, whose exception becomes an error of XLA.
xla::Error* pass_on(const xla::Call& call) {
  try {
    const py::handle to(function);
    to(text_of(call.attributes), arrays_of(call.arguments, false), arrays_of(call.results, true));
    return nullptr;
  } catch (py::error_already_set& raised) {
    const std::string kind = py::str(raised.type().attr("__name__"));
    const std::string message = kind + ": " + std::string(py::str(raised.value()));
    return error(call, xla::kInvalidArgument, message.c_str());
  }
}

/// The C function that is registered with XLA, called by any of its threads.
xla::Error* handle(xla::Call* call) {
  if (call->extension && call->extension->kind == xla::kMetadata) {
    state_version(call->extension);
    return nullptr;
  }
  if (call->stage != xla::kExecute) return nullptr;
  const py::gil_scoped_acquire locked;
  try {
    return pass_on(*call);
  } catch (const std::exception& raised) {
    return error(*call, xla::kInternal, raised.what());
  }
}

py::capsule xla_handler(const py::function& to) {
  if (!dtypes) {
    py::tuple made(kTypes.size());
    for (std::size_t i = 0; i < kTypes.size(); ++i) made[i] = py::dtype(kTypes[i].name);
    dtypes = made.release().ptr();
  }
  function = py::object(to).release().ptr();
  return py::capsule(reinterpret_cast<void*>(&handle));
}

}  // namespace

void register_xla(py::module_& m) { m.def("xla_handler", xla_handler, py::arg("function")); }

}  // namespace mhfast
