//! The crate's tests, one binary: `common` makes models in memory, each other module tests a room.

mod allocation;
mod common;
mod gguf;
mod kernels;
mod model;
mod mutation;
mod placement;
mod pool;

#[global_allocator]
static ALLOCATOR: allocation::Counting = allocation::Counting;
