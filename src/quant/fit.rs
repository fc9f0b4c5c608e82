//! Scales for groups of weights: ggml's searches, by which its files are made.
//!
//! Each tries a few scales around the obvious one, rounds the weights by each, and keeps the scale (and offset) that
//! leaves the least weighted square error, refitted by least squares. Levels are whole numbers held as float32: all
//! loops are over fixed arrays of them, and sums have eight lanes, so that they vectorise.

/// Below this a group is all zero.
const NOTHING: f32 = 1e-15;

/// To the nearest whole number, ties to even; for magnitudes below 2^22.
#[inline(always)]
pub fn nearest(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// The sum of `f(i)` in a fixed order.
#[inline(always)]
fn sum<const N: usize>(f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    for start in (0..N).step_by(8) {
        for lane in 0..8 {
            lanes[lane] += f(start + lane);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// The value of largest magnitude, the first of several.
#[inline(always)]
pub fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, v| if v.abs() > most.abs() { *v } else { most })
}

/// `x ≈ scale * q` with q from `-n` to `n - 1`, errors weighted by `weights`. `levels` become `q + n`.
#[inline(always)]
pub fn signed<const N: usize>(x: &[f32; N], weights: &[f32; N], n: f32, levels: &mut [f32; N]) -> f32 {
    let most = extreme(x);
    if most.abs() < NOTHING {
        levels.fill(0.0);
        return 0.0;
    }
    let mut scale = 0.0;
    let mut best = f32::NEG_INFINITY;
    let mut tried = [0.0; N];
    // The obvious scale first, then some to both sides.
    for step in [0.0, -9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
        .into_iter()
        .chain([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    {
        let inverse = -(n + 0.1 * step) / most;
        for i in 0..N {
            tried[i] = nearest(inverse * x[i]).clamp(-n, n - 1.0);
        }
        let by_x = sum::<N>(|i| weights[i] * x[i] * tried[i]);
        let by_self = sum::<N>(|i| weights[i] * tried[i] * tried[i]);
        if step == 0.0 || by_self > 0.0 && by_x * by_x > best * by_self {
            scale = if by_self > 0.0 { by_x / by_self } else { 0.0 };
            best = scale * by_x;
            *levels = tried.map(|l| l + n);
        }
    }
    scale
}

/// What [`with_offset`] tries.
#[derive(Clone, Copy)]
pub struct Search {
    /// The first scale tried has this many levels more than there are, each next one `step` more.
    pub first: f32,
    pub step: f32,
    pub n_steps: usize,
    /// Errors count by magnitude, not squared.
    pub absolute: bool,
}

/// Of all searches with importances.
pub const FINE: Search = Search { first: -0.9, step: 0.05, n_steps: 36, absolute: false };

/// `x ≈ scale * q - min` with q from 0 to `n` and min from 0 on, errors weighted by `weights`: scale and min.
#[inline(always)]
pub fn with_offset<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    n: f32,
    search: Search,
    levels: &mut [f32; N],
) -> (f32, f32) {
    let mut low = x.iter().fold(x[0], |m, v| m.min(*v)).min(0.0);
    let high = x.iter().fold(x[0], |m, v| m.max(*v));
    if high <= low {
        levels.fill(0.0);
        return (0.0, -low);
    }
    let error_of = |levels: &[f32; N], scale: f32, low: f32| {
        sum::<N>(|i| {
            let off = scale * levels[i] + low - x[i];
            weights[i] * if search.absolute { off.abs() } else { off * off }
        })
    };
    let inverse = n / (high - low);
    let mut scale = 1.0 / inverse;
    for i in 0..N {
        levels[i] = nearest(inverse * (x[i] - low)).clamp(0.0, n);
    }
    let mut best = error_of(levels, scale, low);
    let of_weights = sum::<N>(|i| weights[i]);
    let of_x = sum::<N>(|i| weights[i] * x[i]);
    let mut tried = [0.0; N];
    for step in 0..=search.n_steps {
        // Each step starts from the best offset so far.
        let inverse = (search.first + search.step * step as f32 + n) / (high - low);
        for i in 0..N {
            tried[i] = nearest(inverse * (x[i] - low)).clamp(0.0, n);
        }
        let of_level = sum::<N>(|i| weights[i] * tried[i]);
        let of_square = sum::<N>(|i| weights[i] * tried[i] * tried[i]);
        let of_both = sum::<N>(|i| weights[i] * tried[i] * x[i]);
        let det = of_weights * of_square - of_level * of_level;
        if det > 0.0 {
            let mut this_scale = (of_weights * of_both - of_x * of_level) / det;
            let mut this_low = (of_square * of_x - of_level * of_both) / det;
            if this_low > 0.0 {
                this_low = 0.0;
                this_scale = of_both / of_square;
            }
            let error = error_of(&tried, this_scale, this_low);
            if error < best {
                (best, scale, low) = (error, this_scale, this_low);
                *levels = tried;
            }
        }
    }
    (scale, -low)
}

/// `x ≈ scale * q` with q from 0 to `n`, for x from 0 on: the scale of scales.
pub fn positive<const N: usize>(x: &[f32; N], weights: &[f32; N], n: f32, levels: &mut [f32; N]) -> f32 {
    let most = x.iter().fold(0.0f32, |m, v| m.max(*v));
    if most < NOTHING {
        levels.fill(0.0);
        return 0.0;
    }
    let error_of = |inverse: f32| {
        sum::<N>(|i| {
            let off = x[i] - nearest(inverse * x[i]).min(n) / inverse;
            weights[i] * off * off
        })
    };
    let mut inverse = n / most;
    let mut best = error_of(inverse);
    for step in [-4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0] {
        let tried = (0.1 * step + n) / most;
        let error = error_of(tried);
        if error < best {
            (best, inverse) = (error, tried);
        }
    }
    *levels = x.map(|v| nearest(inverse * v).min(n));
    descend(x, weights, 0.0, n, levels)
}

/// `x ≈ scale * q` with q from `-n` to `n - 1`, errors weighted by squares. `levels` become `q + n`.
pub fn signed_by_descent<const N: usize>(x: &[f32; N], n: f32, levels: &mut [f32; N]) -> f32 {
    let most = extreme(x);
    if most.abs() < NOTHING {
        levels.fill(0.0);
        return 0.0;
    }
    *levels = x.map(|v| nearest(-n / most * v).clamp(-n, n - 1.0));
    let scale = descend(x, &x.map(|v| v * v), -n, n - 1.0, levels);
    *levels = levels.map(|l| l + n);
    scale
}

/// Moves one level at a time to where it fits the others' scale best, as long as that helps; returns the scale.
fn descend<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    least: f32,
    most: f32,
    levels: &mut [f32; N],
) -> f32 {
    let mut by_x = sum::<N>(|i| weights[i] * x[i] * levels[i]);
    let mut by_self = sum::<N>(|i| weights[i] * levels[i] * levels[i]);
    for _ in 0..5 {
        let mut changed = false;
        for i in 0..N {
            let (w, v, l) = (weights[i], x[i], levels[i]);
            let (x_without, self_without) = (by_x - w * v * l, by_self - w * l * l);
            if x_without <= 0.0 || self_without <= 0.0 {
                continue;
            }
            let moved = nearest(v * self_without / x_without).clamp(least, most);
            let (x_with, self_with) = (x_without + w * v * moved, self_without + w * moved * moved);
            if moved != l && self_with > 0.0 && x_with * x_with * by_self > by_x * by_x * self_with {
                (by_x, by_self) = (x_with, self_with);
                levels[i] = moved;
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    if by_self > 0.0 { by_x / by_self } else { 0.0 }
}
