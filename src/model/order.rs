//! The order of a step: its operations, who does each, and the numbers of hand-overs. A function of where a model's layers
//! are, nothing else.

/// One thing to do in a step. Numbers of hand-overs count from 1 on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The host runs layer `number`, the `local`-th of its own.
    HostLayer {
        number: usize,
        local: usize,
    },
    /// The residual goes to a device ...
    Give {
        device: usize,
        exchange: u32,
    },
    /// ... whose layer `local` is run ...
    DeviceLayer {
        device: usize,
        local: usize,
    },
    /// ... and comes back.
    Take {
        device: usize,
        exchange: u32,
    },
    HostHead,
    DeviceHead {
        device: usize,
    },
}

impl Op {
    /// The device whose work it is, if it is one's.
    pub fn device(self) -> Option<usize> {
        match self {
            Op::Give { device, .. }
            | Op::DeviceLayer { device, .. }
            | Op::Take { device, .. }
            | Op::DeviceHead { device } => Some(device),
            Op::HostLayer { .. } | Op::HostHead => None,
        }
    }
}

/// What is to be done in each step.
pub struct Order {
    pub ops: Vec<Op>,
    /// Of each layer, the hand-over in which the host runs its neurons beside a device, where it has any.
    pub exchanges: Vec<Option<u32>>,
    /// Hand-overs of each device.
    pub n_exchanges: Vec<u32>,
}

/// Puts layers in order. `owners` says of each the device whose it is, if it is one's, and its number there or on the host;
/// `is_shared` whether the host has neurons of a device's layer; `head` is the device that makes logits, if one does.
pub fn order(
    owners: &[(Option<usize>, usize)],
    is_shared: &[bool],
    head: Option<usize>,
    n_devices: usize,
) -> Order {
    let mut order =
        Order { ops: Vec::new(), exchanges: vec![None; owners.len()], n_exchanges: vec![0; n_devices] };
    // Where the residual is.
    let mut at = None;
    for (number, (owner, local)) in owners.iter().copied().enumerate() {
        order.go(&mut at, owner);
        match owner {
            Some(device) => {
                order.ops.push(Op::DeviceLayer { device, local });
                order.exchanges[number] = is_shared[number].then(|| order.next(device));
            }
            None => order.ops.push(Op::HostLayer { number, local }),
        }
    }
    order.go(&mut at, head);
    order.ops.push(head.map_or(Op::HostHead, |device| Op::DeviceHead { device }));
    order
}

impl Order {
    /// The number of a device's next hand-over.
    fn next(&mut self, device: usize) -> u32 {
        self.n_exchanges[device] += 1;
        self.n_exchanges[device]
    }

    /// Takes the residual from where it is to another place, by way of the host.
    fn go(&mut self, at: &mut Option<usize>, to: Option<usize>) {
        if *at == to {
            return;
        }
        if let Some(device) = *at {
            let exchange = self.next(device);
            self.ops.push(Op::Take { device, exchange });
        }
        if let Some(device) = to {
            let exchange = self.next(device);
            self.ops.push(Op::Give { device, exchange });
        }
        *at = to;
    }
}
