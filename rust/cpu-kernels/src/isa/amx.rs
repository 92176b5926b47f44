//! Tiles as registers of AMX: permission, shapes, products.

// A receiver is the proof that tiles may be used.
#![allow(unsafe_code, clippy::unused_self)]

use super::{LANES, Tile, TileShape};
use crate::memory::Line;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Number of the Linux system call `arch_prctl`. The next two constants are its request and argument, which let this
/// process use tiles.
const SYS_ARCH_PRCTL: i64 = 158;
const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
const XFEATURE_XTILEDATA: i64 = 18;
/// Bit of CPUID's leaf 7, EDX, for AMX-BF16. The next two constants are those for AMX-TILE and AMX-INT8.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
const AMX_INT8: u32 = 1 << 25;

/// Proof that the machine has AMX, made by [`detect`](Self::detect) alone: code that holds one may use AMX-TILE,
/// AMX-BF16 and AMX-INT8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Amx(());

/// Shapes of eight tiles: the operand of LDTILECFG.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Makes the shapes of four tiles of 16 rows of 64 bytes for sums, two for the first operand of a product and two
    /// for the second.
    const fn new(bytes_of_first: u16, rows_of_second: u8) -> Self {
        let (first, second) = (bytes_of_first, rows_of_second);
        Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, first, first, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, second, second, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }
}

static PAIRS: Config = Config::new(64, 16);
static BYTES: Config = Config::new(32, 8);

impl Amx {
    /// Asks the system once, for all threads, whether tiles may be used; a sandbox may refuse.
    pub(super) fn detect() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let allowed = ALLOWED.get_or_init(|| {
            let wanted = AMX_BF16 | AMX_TILE | AMX_INT8;
            // Miri runs no assembly. What splits rows wants AVX-512, which every processor with tiles has.
            !cfg!(miri)
                && is_x86_feature_detected!("avx512f")
                && __cpuid_count(7, 0).edx & wanted == wanted
                && may_use_tiles()
        });
        allowed.then_some(Self(()))
    }

    /// Sets the shapes of this thread's tiles.
    #[inline]
    pub(super) fn configure(self, shape: TileShape) {
        let config = match shape {
            TileShape::Pairs => &PAIRS,
            TileShape::Bytes => &BYTES,
        };
        // SAFETY: the receiver exists only where the process may use tiles; the operand is 64 bytes of that layout.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
    }

    /// Releases this thread's tiles, so that the system need not save them.
    #[inline]
    pub(super) fn release(self) {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    /// Multiplies tiles as [`Tiling::multiply_bytes`](super::tiles::Tiling::multiply_bytes) says.
    #[inline]
    pub(super) fn multiply_bytes<const PLANES: usize>(
        self,
        rows: &[Line; LANES],
        codes: &[Line; 8],
        c: &mut [[Line; LANES]; PLANES],
    ) {
        // SAFETY: the receiver exists only where the process may use tiles, which are shaped; lines of 64 bytes are
        // read and written, as many as the arguments have.
        unsafe {
            if PLANES == 1 {
                asm!(
                    "tilezero tmm0",
                    "tileloadd tmm6, [{codes} + {line}]",
                    "tileloadd tmm4, [{rows} + {line}]",
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tilestored [{c} + {line}], tmm0",
                    rows = in(reg) rows, codes = in(reg) codes, c = in(reg) c, line = in(reg) 64_usize,
                    out("tmm0") _, out("tmm4") _, out("tmm6") _,
                    options(nostack, preserves_flags),
                );
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "tileloadd tmm6, [{codes} + {line}]",
                    "tileloadd tmm4, [{rows} + {line}]",
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{rows} + {line} + 32]",
                    "tdpbssd tmm1, tmm5, tmm6",
                    "tilestored [{c} + {line}], tmm0", "tilestored [{c} + {line} + 1024], tmm1",
                    rows = in(reg) rows, codes = in(reg) codes, c = in(reg) c, line = in(reg) 64_usize,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Multiplies tiles as [`Tiling::multiply`](super::tiles::Tiling::multiply) says, which has checked the lengths and
    /// [`configure`](Self::configure)d.
    #[inline]
    pub(super) fn multiply<const N: usize>(self, a: &[Tile], b: &[Tile], c: &mut [Tile]) {
        let steps = a.len() / 2;
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        // Each pair of a step's tiles meets without a tile being loaded more often than there are registers for.
        // SAFETY: the receiver exists only where the process may use tiles, which are shaped; each step reads 2 KiB of
        // a and N KiB of b, of which there are as many, and c has room for 2 N tiles.
        unsafe {
            match N {
                1 => asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "test {steps}, {steps}", "jz 3f",
                    "2:",
                    "tileloadd tmm4, [{a} + {line}]", "tileloadd tmm6, [{b} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "add {a}, 2048", "add {b}, 1024",
                    "dec {steps}", "jnz 2b",
                    "3:",
                    "tilestored [{c} + {line}], tmm0", "tilestored [{c} + {line} + 1024], tmm1",
                    a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _, c = in(reg) c,
                    line = in(reg) 64_usize, out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack),
                ),
                2 => asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "test {steps}, {steps}", "jz 3f",
                    "2:",
                    "tileloadd tmm4, [{a} + {line}]", "tileloadd tmm6, [{b} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tileloadd tmm7, [{b} + {line} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, 2048", "add {b}, 2048",
                    "dec {steps}", "jnz 2b",
                    "3:",
                    "tilestored [{c} + {line}], tmm0", "tilestored [{c} + {line} + 1024], tmm1",
                    "tilestored [{c} + {line} + 2048], tmm2", "tilestored [{c} + {line} + 3072], tmm3",
                    a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _, c = in(reg) c,
                    line = in(reg) 64_usize, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                ),
                _ => asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                    "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                    "test {steps}, {steps}", "jz 3f",
                    "2:",
                    "tileloadd tmm6, [{a} + {line}]", "tileloadd tmm7, [{b} + {line}]",
                    "tdpbf16ps tmm0, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm3, tmm6, tmm7",
                    "tileloadd tmm7, [{b} + {line} + 1024]",
                    "tdpbf16ps tmm4, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {line}]",
                    "tdpbf16ps tmm1, tmm6, tmm7",
                    "tileloadd tmm7, [{b} + {line} + 2048]",
                    "tdpbf16ps tmm2, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm5, tmm6, tmm7",
                    "add {a}, 2048", "add {b}, 3072",
                    "dec {steps}", "jnz 2b",
                    "3:",
                    "tilestored [{c} + {line}], tmm0", "tilestored [{c} + {line} + 1024], tmm1",
                    "tilestored [{c} + {line} + 2048], tmm2", "tilestored [{c} + {line} + 3072], tmm3",
                    "tilestored [{c} + {line} + 4096], tmm4", "tilestored [{c} + {line} + 5120], tmm5",
                    a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _, c = in(reg) c,
                    line = in(reg) 64_usize, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                ),
            }
        }
    }
}

/// Returns whether the system lets this process use tiles.
fn may_use_tiles() -> bool {
    let mut result = SYS_ARCH_PRCTL;
    // SAFETY: a system call that reads and writes no memory of this process.
    unsafe {
        asm!(
            "syscall",
            inout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack, nomem),
        );
    }
    result == 0
}
