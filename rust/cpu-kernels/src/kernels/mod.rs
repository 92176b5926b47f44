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

pub use activation::{Activation, GateMul, Softcap};
pub use argmax::{Argmax, better};
pub use attention::{Attend, AttendScratch, KvElement, KvHead};
pub use blocks::{BlockProduct, MAX_ROWS};
pub use conv::{ConvSilu, GatedConv};
pub use delta::{DeltaHead, GatedNorm, LogPlaces, Sigmoid, Unit};
pub use gates::{decay, rate, sigmoid};
pub use matmul::{Product, Unpacked};
pub use norm::{RmsNorm, RmsScale};
pub use pairs::{LEAST_WEIGHT, PAIRS, RoundPairs};
pub use query_factor::query_factor;
pub use rope::{Angles, QkHead};
pub use rounded::{Round, Rounded, RoundedRoom, Rounding};
pub use route::Route;
pub use tiles::{Layout, Split, TileProduct};

use crate::isa::Isa;

/// Gives kernels their function `run`. It is no generic function, so that it is compiled in this crate, once for each
/// instruction set.
macro_rules! runs {
    ($($kernel:ty $(=> $output:ty)?),* $(,)?) => {
        $(impl $kernel {
            /// Runs the kernel with these instructions.
            pub fn run(self, isa: Isa) $(-> $output)? {
                isa.run(self)
            }
        })*
    };
}

runs!(
    Angles<'_>,
    Argmax<'_> => Option<(usize, f32)>,
    ConvSilu<'_>,
    DeltaHead<'_>,
    GatedConv<'_>,
    GatedNorm<'_>,
    QkHead<'_>,
    RmsNorm<'_>,
    RmsScale<'_> => f32,
    Route<'_>,
    Sigmoid<'_>,
    Softcap<'_>,
    Split<'_>,
    TileProduct<'_>,
    Unit<'_>,
);
