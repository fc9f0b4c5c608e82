//! What a device's work costs: bandwidths, launches, hand-overs. Nothing here runs a model.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::Result;

use super::form::Form;
use super::launch::Stream;
use super::mailbox::Mailbox;
use super::module::{Kernels, Rows, Weights};
use super::workspace::Shape;

/// Columns of the matrices, and values that are handed over.
const WIDTH: usize = 4096;
/// Times that each is done; the median counts.
const ROUNDS: usize = 9;
/// Kernels in a row, and hand-overs.
const IN_A_ROW: usize = 50;
/// Tokens of a long prompt.
const TOKENS: usize = 256;

pub struct Measure {
    pub what: String,
    pub value: f64,
    pub unit: &'static str,
}

/// The median of the seconds that `work` takes, until its last is done.
fn seconds(stream: &Stream, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work()?;
        stream.finish()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

/// Measures device `number` on matrices and copies of about `n_bytes`, which it must have room for four times.
pub fn measure(number: usize, n_bytes: usize) -> Result<Vec<Measure>> {
    let stream = Stream::new(number)?;
    let mut out = Vec::new();
    let mut tell = |what: &str, value: f64, unit| out.push(Measure { what: what.to_owned(), value, unit });
    let start = Instant::now();
    let kernels = Kernels::load(&stream, &Form::ALL)?;
    tell(
        "loading all kernels (the driver compiles them, and keeps them)",
        start.elapsed().as_secs_f64(),
        "s",
    );
    starting(&stream, &kernels, &mut tell)?;
    copying(&stream, n_bytes, &mut tell)?;
    multiplying(&stream, &kernels, n_bytes, &mut tell)?;
    Ok(out)
}

type Tell<'a> = dyn FnMut(&str, f64, &'static str) + 'a;

/// What it costs to start a kernel, and to let the host know that it is done.
fn starting(stream: &Arc<Stream>, kernels: &Kernels, tell: &mut Tell) -> Result<()> {
    let zeroed = |n_bytes: usize| {
        let memory = stream.allocate(n_bytes)?;
        stream.zero(memory.address(), n_bytes)?;
        Ok::<_, crate::Error>(memory)
    };
    let (x, y) = (zeroed(4 * WIDTH)?, zeroed(4 * WIDTH)?);
    let (ticket, base) = (zeroed(4)?, zeroed(4)?);
    let mailbox = Mailbox::new(stream, &Shape { n_embd: WIDTH, n_ff: 1, batch: 1, ..Shape::default() })?;
    let told = stream.pin(4)?;
    let add = || kernels.add(x.address(), y.address(), WIDTH);
    let each = |seconds: f64| 1e6 * seconds / IN_A_ROW as f64;
    let many = || (0..IN_A_ROW).try_for_each(|_| add());
    tell("a kernel, launched", each(seconds(stream, many)?), "us");
    let graph = stream.record(many)?;
    tell("a kernel of a graph", each(seconds(stream, || stream.launch_graph(&graph))?), "us");

    tell("a kernel, and the host knows by waiting for the stream", 1e6 * seconds(stream, add)?, "us");
    let by_call = || {
        let before = told.flag(0).load(Ordering::Acquire);
        add()?;
        stream.notify(&told)?;
        let mut is_over = false;
        while !is_over && told.flag(0).load(Ordering::Acquire) == before {
            is_over = stream.is_done()?;
        }
        Ok(())
    };
    tell("a kernel, and the host knows by a host function", 1e6 * seconds(stream, by_call)?, "us");
    let hand_over = |number: u32| {
        let (flag, base) = (mailbox.posted_address(), base.address());
        kernels.hand_over(
            x.address(),
            mailbox.x_address(),
            (0, 0),
            WIDTH,
            ticket.address(),
            flag,
            base,
            number,
        )
    };
    let mut number = 0;
    let by_flag = || {
        number += 1;
        hand_over(number)?;
        mailbox.wait(number, stream, &mut || false)
    };
    tell("4096 values handed over, and the host knows by a flag", 1e6 * seconds(stream, by_flag)?, "us");

    let mut first = number;
    let values = vec![0.0; WIDTH];
    let there_and_back = || {
        for i in 1..=IN_A_ROW as u32 {
            hand_over(first + i)?;
            mailbox.let_wait(kernels, base.address(), first + i)?;
            kernels.take_over(mailbox.y_address(), x.address(), WIDTH)?;
        }
        for i in 1..=IN_A_ROW as u32 {
            mailbox.wait(first + i, stream, &mut || false)?;
            mailbox.answer(first + i, &values);
        }
        first += IN_A_ROW as u32;
        Ok(())
    };
    tell("4096 values there and back", each(seconds(stream, there_and_back)?), "us");
    mailbox.settle(stream)
}

fn copying(stream: &Arc<Stream>, n_bytes: usize, tell: &mut Tell) -> Result<()> {
    let (from, to) = (stream.allocate(n_bytes)?, stream.allocate(n_bytes)?);
    let host = stream.pin(n_bytes)?;
    let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e9;
    let on_device = seconds(stream, || stream.copy(to.address(), from.address(), n_bytes))?;
    tell("a copy on the device, read and written", rate(2 * n_bytes, on_device), "GB/s");
    let over = seconds(stream, || stream.copy_in(&to, &host, n_bytes))?;
    tell("a copy from pinned memory", rate(n_bytes, over), "GB/s");
    Ok(())
}

fn multiplying(stream: &Arc<Stream>, kernels: &Kernels, n_bytes: usize, tell: &mut Tell) -> Result<()> {
    for form in Form::ALL {
        let row_bytes = form.row_bytes(WIDTH);
        let n_rows = (n_bytes / row_bytes).max(1);
        let matrix = stream.allocate(n_rows * row_bytes)?;
        let memory = [4, 1, 1, 1, 1, 1].map(|size| stream.allocate(size * TOKENS * WIDTH));
        let [values, high, middle, low, d, sum] = memory;
        let (values, planes) = (values?, [high?, middle?, low?, d?, sum?]);
        let outputs = stream.allocate(4 * TOKENS * n_rows)?;
        for memory in planes.iter().chain([&matrix, &values]) {
            stream.zero(memory.address(), memory.n_bytes())?;
        }
        let [high, middle, low, d, sum] = planes.each_ref().map(|p| p.address());
        let rows = Rows { values: values.address(), high, middle, low, d, sum };
        let weights = Weights { form, address: matrix.address(), bias: 0, n_rows, n_cols: WIDTH };
        let to = outputs.address();
        let multiply = |n_tokens| move || kernels.matmul(weights, rows, to, n_tokens);
        let one = seconds(stream, multiply(1))?;
        let what = format!("{} weights times one token", form.name());
        tell(&what, (n_rows * row_bytes) as f64 / one / 1e9, "GB/s");
        let many = seconds(stream, multiply(TOKENS))?;
        let what = format!("{} weights times {TOKENS} tokens", form.name());
        tell(&what, (2 * n_rows * WIDTH * TOKENS) as f64 / many / 1e12, "TFLOP/s");
    }
    Ok(())
}
