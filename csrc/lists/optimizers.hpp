// Every optimizer, once: its header, and a line
//
//   X(Type, name)
//
// Type is also the name of the Python class, whose own fields, except lr, are those of the header;
// `name` that under which runs are saved. From these come the settings as they cross from Python,
// the choice of a rule and the kernels of the steps.
#pragma once

#include "../optimizers/adagrad.hpp"
#include "../optimizers/adam.hpp"
#include "../optimizers/adamw.hpp"
#include "../optimizers/exponentiated_gradient.hpp"
#include "../optimizers/gradient_descent.hpp"
#include "../optimizers/mirror_descent.hpp"
#include "../optimizers/momentum.hpp"
#include "../optimizers/normalized_gradient_descent.hpp"
#include "../optimizers/polyak_step.hpp"
#include "../optimizers/rmsprop.hpp"
#include "../optimizers/sign_descent.hpp"
#include "../optimizers/steepest_descent.hpp"

#define MHFAST_OPTIMIZERS(X)                                \
  X(GradientDescent, gradient_descent)                      \
  X(NormalizedGradientDescent, normalized_gradient_descent) \
  X(PolyakStep, polyak_step)                                \
  X(Momentum, momentum)                                     \
  X(Adam, adam)                                             \
  X(MirrorDescent, mirror_descent)                          \
  X(SignDescent, sign_descent)                              \
  X(AdamW, adamw)                                           \
  X(AdaGrad, adagrad)                                       \
  X(RMSProp, rmsprop)                                       \
  X(ExponentiatedGradient, exponentiated_gradient)          \
  X(SteepestDescent, steepest_descent)
