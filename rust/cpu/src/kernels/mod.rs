//! Kernels: computations of a pass, written once over the lanes of [`Simd`](crate::isa::Simd). They own no memory and
//! use no threads.

// Single letters are those of the formulas.
#![allow(clippy::many_single_char_names)]

mod activation;
mod argmax;
mod attention;
mod blocks;
mod code;
mod conv;
mod delta;
mod element;
mod exp;
mod gates;
mod matmul;
mod norm;
mod pairs;
mod query_factor;
mod rope;
mod rounded;
mod route;
mod tiles;

pub(crate) use activation::{ClampedGateMul, GateMul, Softcap};
pub(crate) use argmax::{Argmax, better};
pub(crate) use attention::{Attend, AttendScratch, KvRead};
pub(crate) use blocks::BlockProduct;
pub(crate) use conv::{ConvSilu, GatedConv};
pub(crate) use delta::{DeltaHead, GatedNorm, LogPlaces, Sigmoid, Unit};
pub(crate) use element::Element;
pub(crate) use gates::{decay, rate, sigmoid};
pub(crate) use matmul::Product;
pub(crate) use norm::{RmsNorm, RmsScale};
pub(crate) use pairs::{LEAST_WEIGHT, PAIRS, RoundPairs};
pub(crate) use query_factor::query_factor;
pub(crate) use rope::{Angles, QkHead};
pub use rounded::Rounding;
pub(crate) use rounded::{Round, Rounded, RoundedRoom};
pub(crate) use route::Route;
pub(crate) use tiles::{Layout, Split, TileProduct};
