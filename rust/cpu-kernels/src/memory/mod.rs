//! Borrowed memory: tensors by address, kept alive by an owner. Knows no shapes.

#![allow(unsafe_code)]

mod fp16;
mod fp8;
mod lines;
mod split;
mod vectors;

pub use fp8::{E4m3, E5m2};
pub(crate) use fp16::{from_f16, to_f16};
pub(crate) use lines::{Line, Pages};
pub use split::{Columns, ColumnsMut, MAX_PARTS, Planes, PlanesMut};
pub(crate) use vectors::LINE_BYTES;
pub use vectors::Vectors;

use crate::error::{Error, Result};
use std::any::Any;
use std::ptr::NonNull;

/// A bf16 number: the upper half of an f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    /// Converts to the nearest bf16, ties to even. NaN stays NaN.
    #[inline]
    pub fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        if x.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self((bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16)
    }

    /// Returns the numbers with these bits, in place.
    #[inline(always)]
    pub(crate) fn of_bits<const N: usize>(bits: &[u16; N]) -> &[Self; N] {
        // SAFETY: a bf16 number is its bits, by `repr(transparent)`.
        unsafe { &*std::ptr::from_ref(bits).cast() }
    }

    /// Converts to f32, exactly.
    #[inline]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// Number whose bytes are all initialised, and for which all bytes are a number. No other crate can implement the trait,
/// because none can name it.
pub trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for Bf16 {}
impl Plain for E4m3 {}
impl Plain for E5m2 {}
impl Plain for u16 {}
impl Plain for i8 {}
impl Plain for Line {}

/// Returns the bytes of numbers.
pub fn bytes_of<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: plain numbers have no padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Returns the bytes of numbers, writable.
pub fn bytes_of_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; whatever is written is a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// Owner of borrowed memory, which keeps it valid and is dropped with the memory's handle.
pub type Owner = Box<dyn Any + Send + Sync>;

/// Read-only elements that `owner` keeps alive. `T` is `f32`, [`Bf16`] or another plain number.
pub struct Memory<T> {
    address: NonNull<T>,
    len: usize,
    _owner: Owner,
}

/// Elements that `owner` keeps alive; passes write them and hold them by `&mut`. `T` is a plain number.
pub struct MemoryMut<T> {
    address: NonNull<T>,
    len: usize,
    _owner: Owner,
}

// SAFETY: the owner may move and be shared between threads, and elements are reached through &self only to be read.
unsafe impl<T: Send + Sync> Send for Memory<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Memory<T> {}
// SAFETY: the owner may move and be shared between threads, and elements are written through &mut self only.
unsafe impl<T: Send + Sync> Send for MemoryMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for MemoryMut<T> {}

/// Rejects null and addresses that are no multiple of the element's alignment; `name` is the error's field.
fn check_address<T>(name: &str, address: *mut T) -> Result<NonNull<T>> {
    let alignment = align_of::<T>();
    NonNull::new(address).filter(|address| address.as_ptr().is_aligned()).ok_or_else(|| {
        Error::invalid(
            format!("{name}'s address"),
            format!("{address:p}"),
            format!("a multiple of {alignment} other than 0"),
        )
    })
}

impl<T: Copy + Send + Sync + 'static> Memory<T> {
    /// Borrows the `len` elements from `address` on, kept alive by `owner`. `name` is the error's field.
    ///
    /// # Errors
    /// If the address is null or misaligned.
    ///
    /// # Safety
    /// While the result lives: all elements are initialised, stay where they are, and are not written.
    pub unsafe fn borrow(name: &str, address: *const T, len: usize, owner: Owner) -> Result<Self> {
        Ok(Self { address: check_address(name, address.cast_mut())?, len, _owner: owner })
    }

    /// Makes memory that owns its elements.
    pub fn from_vec(elements: Vec<T>) -> Self {
        let (address, len) = (NonNull::from(elements.as_slice()).cast(), elements.len());
        Self { address, len, _owner: Box::new(elements) }
    }

    /// Returns all elements.
    #[inline]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `borrow`'s contract, or the vector that the owner is, whose heap memory does not move with it.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl<T: Copy + Send + Sync + 'static> MemoryMut<T> {
    /// Borrows the `len` elements from `address` on, kept alive by `owner`. `name` is the error's field.
    ///
    /// # Errors
    /// If the address is null or misaligned.
    ///
    /// # Safety
    /// While the result lives: all elements are initialised and stay where they are. While a call holds the result by
    /// `&` or `&mut`: no other thread writes them; by `&mut`: none reads them.
    pub unsafe fn borrow(name: &str, address: *mut T, len: usize, owner: Owner) -> Result<Self> {
        Ok(Self { address: check_address(name, address)?, len, _owner: owner })
    }

    /// Makes memory that owns its elements.
    pub fn from_vec(mut elements: Vec<T>) -> Self {
        let (address, len) = (NonNull::from(elements.as_mut_slice()).cast(), elements.len());
        Self { address, len, _owner: Box::new(elements) }
    }

    /// Returns all elements.
    #[inline]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `borrow`'s contract, or the vector that the owner is.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    /// Returns all elements, writable.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and &mut self is the only way to write.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}
